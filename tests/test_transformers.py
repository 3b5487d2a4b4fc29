"""Models of transformers under attn_implementation="distca", on any number of ranks.

Their results equal those of single documents with eager attention.
"""

from dataclasses import astuple

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers, and this environment has none")

import packed_models as pm  # noqa: E402
from packed_models import LENGTHS, Packed  # noqa: E402

import distca  # noqa: E402
from distca import attention, ops  # noqa: E402
from distca.integrations import boundaries  # noqa: E402

TOLERANCE = 1e-5
LATENT = {"deepseek_v3": 16, "kimi": 40}  # v's head_dim, where that of q and k is 24
MODELS = ["llama", "qwen3", "mistral", "gemma", "gemma2", "gemma3", "gpt_oss", "llama4", *LATENT]
ALTERNATING = ("gemma2", "gemma3", "gpt_oss", "llama4")  # masks differ from layer to layer


class Plans:
    """Records the plans of this rank inside the scope."""

    def __enter__(self) -> list[distca.Plan]:
        self.plans, self.real = [], attention.plan

        def recorded(*args, **kwargs) -> distca.Plan:
            self.plans.append(self.real(*args, **kwargs))
            return self.plans[-1]

        boundaries.plan = attention.plan = recorded
        return self.plans

    def __exit__(self, *error) -> None:
        boundaries.plan = attention.plan = self.real


def checkpoint(model, use_reentrant: bool) -> None:
    former_name = model.gradient_checkpointing_enable
    enable = getattr(model, "activation_checkpointing_enable", former_name)
    enable({"use_reentrant": use_reentrant})
    model.enable_input_require_grads()


def model_errors(rank: int, world_size: int, name: str) -> dict[str, tuple]:
    """Return, for each way to train, the worst error and the bytes that each plan sends."""
    model, packed = pm.model_of(name), Packed.of(LENGTHS[rank], seed=rank)
    truth = pm.true_step(model, packed)
    by_way = {}
    for way in ("position_ids", "cu_seq_lens", "both", "checkpoint", "reentrant"):
        if way in ("checkpoint", "reentrant"):
            checkpoint(model, way == "reentrant")
        with Plans() as plans:
            error = pm.worst_error(pm.step(model, packed, way), truth)
        by_way[way] = (error, [sum(each.report().bytes_out) for each in plans])
    return by_way


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_equal_eager_by_document(ranks, world_size, name):
    for by_way in ranks(world_size).run(model_errors, name):
        for way, (error, bytes_by_plan) in by_way.items():
            assert error <= TOLERANCE, (way, error)
            assert len(bytes_by_plan) == (2 if name in ALTERNATING else 1), way
            assert (sum(bytes_by_plan) > 0) == (world_size > 1), "the case must move rows"


def shapes_of_calls(rank: int, world_size: int, name: str) -> tuple:
    """Return the shape that a plan is for, and that of the call."""
    model, packed = pm.model_of(name), Packed.of(LENGTHS[rank], seed=rank)
    with Plans() as plans:
        pm.step(model, packed)
    return plans[0].solution().shape, ops.attention_shape(plans[0].group_name)


@pytest.mark.parametrize("name", LATENT)
def test_latent_attention_is_not_padded(ranks, name):
    shape = distca.AttentionShape(4, 4, 24, 4, LATENT[name])
    assert ranks(2).run(shapes_of_calls, name) == [(shape, list(astuple(shape)))] * 2


@pytest.mark.parametrize("name", MODELS)
def test_without_a_process_group(name):
    for way, (error, bytes_by_plan) in model_errors(0, 1, name).items():
        assert error <= TOLERANCE and bytes_by_plan == [], way


def test_the_comparison_notices_a_lost_boundary_and_a_lost_window():
    model, packed = pm.model_of("llama"), Packed.of([5, 3, 20])
    truth = pm.true_step(model, packed)
    merged = Packed([8, 20], packed.ids, packed.labels, torch.tensor([[*range(8), *range(20)]]))
    assert pm.worst_error(pm.step(model, merged), truth) > 100 * TOLERANCE
    model = pm.model_of("mistral")
    truth = pm.true_step(model, packed)
    model.config.sliding_window = pm.WINDOW + 1
    assert pm.worst_error(pm.step(model, packed), truth) > 100 * TOLERANCE


@pytest.mark.parametrize("batch, positions", [(3, None), (1, None), (3, "one row"), (3, "packed")])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_rows_of_a_batch_are_separate_documents(name, batch, positions):
    """Without position_ids every row is one document, as everywhere in transformers."""
    lengths = [4, 7] if positions == "packed" else [11]
    packed, model = Packed.of(lengths * batch), pm.model_of(name)
    position_ids = torch.cat([torch.arange(n) for n in lengths])[None]
    keywords = {} if positions is None else {"position_ids": position_ids}
    if positions == "packed":
        keywords = {"position_ids": position_ids.expand(batch, -1)}
    if positions is None:
        keywords = {"attention_mask": torch.ones(batch, 11, dtype=torch.int64)}
    logits = model(packed.ids.view(batch, 11), **keywords).logits
    truth = pm.true_logits(model, packed).view_as(logits)
    assert pm.relative_error(logits, truth) <= TOLERANCE


def sample_errors(rank: int, world_size: int) -> tuple[float, int]:
    """Train on samples of one prompt, which is in the row once. Return the worst error against
    eager on each sample behind a copy of the prompt, and the bytes that the plan sends."""
    model, lengths = pm.model_of("llama"), [[120, 30, 7, 50], [40, 9, 9]][rank]
    parents = [-1, *[0] * (len(lengths) - 1)]
    packed = Packed.of(lengths, seed=rank)
    documents = distca.Documents(packed.cu_seqlens, parents=parents)
    packed.labels[:, : lengths[0]] = -100  # of the prompt
    keywords = {"position_ids": documents.position_ids[None], "documents": documents}
    model.zero_grad()
    loss = packed.loss(model(input_ids=packed.ids, **keywords).logits)
    loss.backward()
    got = (loss.detach(), pm.gradients(model))
    ids, labels = (each.split(lengths, dim=1) for each in (packed.ids, packed.labels))
    behind = [torch.cat([ids[0], each], dim=1) for each in ids[1:]]
    of_prompt = [torch.cat([labels[0], each], dim=1) for each in labels[1:]]
    whole_lengths = [each.shape[1] for each in behind]
    whole = Packed(whole_lengths, torch.cat(behind, 1), torch.cat(of_prompt, 1), None)
    bytes_out = documents._plans[documents.plan_key((-1, 0))].report().bytes_out
    return pm.worst_error(got, pm.true_step(model, whole)), sum(bytes_out)


def train_chunks_of_samples(rank: int, world_size: int) -> None:
    model, packed = pm.model_of("llama4"), Packed.of([9, 4])
    documents = distca.Documents(packed.cu_seqlens, parents=[-1, 0]) if rank else None
    model(**packed.keywords(), documents=documents)


def test_chunks_of_samples_are_refused_on_all_ranks(own_ranks):
    for outcome in own_ranks(2).outcomes(train_chunks_of_samples, timeout_s=60):
        assert "cannot be cut into chunks; expected whole" in outcome.error


def test_samples_of_one_prompt(ranks):
    for error, bytes_out in ranks(2).run(sample_errors):
        assert error <= TOLERANCE and bytes_out > 0


def train_with_many_passes(rank: int, world_size: int, use_checkpoint: bool) -> float:
    """Run two forward passes, then their backward passes. Return the worst error."""
    model = pm.model_of("gemma3")
    if use_checkpoint:
        checkpoint(model, use_reentrant=False)
    batches = [Packed.of(LENGTHS[rank], 1), Packed.of([2] if rank else [9, 180], 2)]
    truths = [pm.true_step(model, packed) for packed in batches]
    model.zero_grad()
    losses = [packed.loss(model(**packed.keywords()).logits) for packed in batches]
    sum(losses).backward()
    got = (sum(losses).detach(), pm.gradients(model))
    total = {name: truths[0][1][name] + truths[1][1][name] for name in got[1]}
    return pm.worst_error(got, (truths[0][0] + truths[1][0], total))


@pytest.mark.parametrize("use_checkpoint", [False, True])
def test_several_forward_passes_before_the_backward_passes(ranks, use_checkpoint):
    assert max(ranks(2).run(train_with_many_passes, use_checkpoint)) <= TOLERANCE


def reuse_tensor_on_one_rank(rank: int, world_size: int, way: str) -> tuple[float, int]:
    """Pass the same position_ids on rank 0 to every pass, once changed in place."""
    model, worst = pm.model_of("llama"), 0.0
    if way != "plain":
        checkpoint(model, way == "reentrant")
    same = Packed.of([70, 30]).position_ids
    first_plan = distca.init().num_plans
    for step in range(3):
        lengths = [70, 30] if step < 2 else [1, 99]
        packed = Packed.of(lengths if rank == 0 else [3, 1, 1 + step], seed=step)
        if rank == 0:
            same.copy_(packed.position_ids) if step == 2 else None
            packed.position_ids = same
        worst = max(worst, pm.worst_error(pm.step(model, packed), pm.true_step(model, packed)))
    return worst, distca.init().num_plans - first_plan


@pytest.mark.parametrize("way", ["plain", "checkpoint", "reentrant"])
def test_every_forward_pass_has_its_own_plan(ranks, way):
    for worst, num_plans in ranks(2).run(reuse_tensor_on_one_rank, way, timeout_s=30):
        assert worst <= TOLERANCE and num_plans == 3


def evaluate_unevenly(rank: int, world_size: int, name: str, mode: str) -> tuple[float, int]:
    """Evaluate a different number of packed batches on every rank, then train together."""
    model, worst = pm.model_of(name), 0.0
    first_plan = distca.init().num_plans
    scope = {"no_grad": torch.no_grad, "inference": torch.inference_mode}.get(mode)
    model.train(mode == "no_grad")
    for seed in range(3 * rank):
        packed = Packed.of([30, 1, 9], seed)
        truth = pm.true_logits(model, packed).detach()
        with scope() if scope else torch.enable_grad():
            for boundaries in ("position_ids", "both"):
                logits = model(**packed.keywords(boundaries)).logits
                worst = max(worst, pm.relative_error(logits.detach(), truth))
    num_plans = distca.init().num_plans - first_plan
    packed = Packed.of(LENGTHS[rank])
    trained = pm.worst_error(pm.step(model.train(), packed), pm.true_step(model, packed))
    return max(worst, trained), num_plans


@pytest.mark.parametrize("mode", ["no_grad", "inference", "eval"])
@pytest.mark.parametrize("name", ["gemma3", "gpt_oss"])
def test_evaluation_stays_on_its_rank(ranks, name, mode):
    for worst, num_plans in ranks(2).run(evaluate_unevenly, name, mode):
        assert worst <= TOLERANCE and num_plans == 0


def generate(rank: int, world_size: int, name: str) -> bool:
    """Generate on every rank from another prompt. Return whether tokens equal those of eager."""
    model = pm.model_of(name, pad_token_id=0).train(rank == 0)
    ids = torch.randint(1, pm.VOCAB_SIZE, (2, 9 + rank), generator=torch.Generator().manual_seed(1))
    padding = torch.ones_like(ids)
    padding[0, :4] = 0
    results = []
    for each in (model, pm.with_attention(model, "eager")):
        options = {"max_new_tokens": 12 + 3 * rank, "do_sample": False, "pad_token_id": 0}
        results += [
            each.generate(ids, attention_mask=padding, **options),
            each.generate(ids, use_cache=False, **options),
            each.generate(ids, cache_implementation="static", disable_compile=True, **options),
        ]
    ours, eagers = results[:3], results[3:]
    return all(torch.equal(a, b) for a, b in zip(ours, eagers, strict=True))


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gemma3", "gpt_oss"])
def test_generate_stays_on_its_rank_and_equals_eager(ranks, name):
    assert ranks(2).run(generate, name) == [True, True]


def autocast_errors(rank: int, world_size: int) -> tuple[float, float]:
    """Return the worst error against float32 by document, of distca and of torch's sdpa."""
    model, packed = pm.model_of("qwen3"), Packed.of(LENGTHS[rank], rank)
    truth = pm.true_step(model, packed)
    with torch.autocast("cpu", torch.bfloat16):
        ours = pm.step(model, packed)
        torchs = pm.step(pm.with_attention(model, "sdpa"), packed)
    return pm.worst_error(ours, truth), pm.worst_error(torchs, truth)


def test_bfloat16_autocast_is_as_exact_as_sdpa(ranks):
    for ours, torchs in ranks(2).run(autocast_errors):
        assert ours <= 2 * torchs


def test_compiled_model_equals_eager_by_document():
    packed, model = Packed.of([13, 1, 22]), pm.model_of("llama")
    truth = pm.true_step(model, packed)
    compiled = torch.compile(model, backend="eager")
    loss = packed.loss(compiled(**packed.keywords()).logits)
    model.zero_grad()
    loss.backward()
    assert pm.worst_error((loss.detach(), pm.gradients(model)), truth) <= TOLERANCE


def train_disabled(rank: int, world_size: int) -> tuple[float, int]:
    distca.close()
    opened = distca.init(options=distca.Options(enabled=False))
    model, packed = pm.model_of("llama"), Packed.of(LENGTHS[rank])
    error = pm.worst_error(pm.step(model, packed), pm.true_step(model, packed))
    num_plans = opened.num_plans
    distca.close()
    return error, num_plans


def test_without_balancing_attention_stays_on_its_rank(ranks):
    for error, num_plans in ranks(2).run(train_disabled):
        assert error <= TOLERANCE and num_plans == 0
