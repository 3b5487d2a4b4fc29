"""Models of transformers without gradients and in eval mode, under Options.balance_no_grad."""

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers, and this environment has none")

import packed_models as pm  # noqa: E402
from packed_models import LENGTHS, Packed  # noqa: E402
from test_call_orders import HANG_S, broken_ranks  # noqa: E402, F401  a fixture
from test_no_grad import opened  # noqa: E402
from test_transformers import TOLERANCE, Plans  # noqa: E402

import distca  # noqa: E402
from distca.integrations import transformers as integration  # noqa: E402

MODES = {"no_grad": torch.no_grad, "inference": torch.inference_mode, "eval": torch.enable_grad}


def evaluate_together(rank: int, world_size: int, name: str, mode: str) -> tuple:
    """Run a model and a reference model on one batch, twice, generate on one rank, and train.

    Return the worst error, the bytes that each plan of the passes without training sends, and the
    number of plans while generating.
    """
    opened(balance_no_grad=True)
    models = [pm.model_of(name, seed) for seed in (0, 1)]
    models[0].train(mode != "eval")
    models[1].eval()
    packed, errors = Packed.of(LENGTHS[rank], seed=rank), []
    truths = [pm.true_logits(model, packed).detach() for model in models]
    with MODES[mode](), Plans() as plans:
        packed.position_ids = packed.position_ids.clone()  # in inference mode without a version
        for model, truth in [*zip(models, truths, strict=True)] * 2:
            logits = model(**packed.keywords()).logits.detach()
            errors.append(pm.relative_error(logits, truth))
    sent = [sum(each.report().bytes_out) for each in plans]
    with Plans() as plans_of_generate:
        for _ in range(rank):
            models[0].generate(packed.ids[:, :9], max_new_tokens=4, do_sample=False)
    trained = pm.step(models[0].train(), packed)
    errors.append(pm.worst_error(trained, pm.true_step(models[0], packed)))
    distca.close()
    return max(errors), sent, len(plans_of_generate)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_passes_are_balanced_and_generation_stays_on_its_rank(ranks, name, mode):
    for error, sent, num_generated in ranks(2).run(evaluate_together, name, mode):
        assert error <= TOLERANCE and num_generated == 0
        # The two models share the plans of a batch, one for each window.
        assert len(sent) == 2 * (2 if name == "gemma3" else 1) and sum(sent) > 0


def evaluate_in_halves(rank: int, world_size: int) -> float:
    opened(balance_no_grad=True)
    packed = Packed.of(LENGTHS[rank], seed=rank)
    truth = pm.true_logits(pm.model_of("llama"), packed).detach()
    model = integration.ping_pong(pm.model_of("llama")).eval()
    with torch.no_grad():
        error = pm.relative_error(model(**packed.keywords()).logits, truth)
    distca.close()
    return error


def test_ping_pong(ranks):
    assert max(ranks(2).run(evaluate_in_halves)) <= TOLERANCE


def evaluate_a_padded_batch(rank: int, world_size: int) -> None:
    opened(balance_no_grad=True)
    model, packed = pm.model_of("llama").eval(), Packed.of([30, 1, 9])
    keywords = packed.keywords()
    if rank == 1:
        mask = torch.ones_like(packed.ids)
        mask[0, :4] = 0
        keywords["attention_mask"] = mask
    with torch.no_grad():
        model(**keywords)


def test_a_padded_batch_is_refused_on_every_rank(broken_ranks):  # noqa: F811
    outcomes = broken_ranks.outcomes(evaluate_a_padded_batch, timeout_s=HANG_S)
    message = "under balance_no_grad (4 of 40 tokens are padding); expected None"
    assert all(message in outcome.error for outcome in outcomes), outcomes
