"""Training runs on one rank of a gloo group: transformers' Trainer, TRL's SFTTrainer, FSDP2.

Each run returns this rank's losses and its number of plans.
"""

import os
import tempfile

import accelerate
import datasets
import packed_models as pm
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
import trl
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from recorded import recorded_plans
from tokenizers import Tokenizer, models

import distca
from distca.integrations.trainer import plan_batches
from distca.integrations.transformers import ping_pong

NUM_STEPS = 20
NUM_DOCUMENTS = 131  # not a multiple of ranks or of batch sizes


def join(rank: int, world_size: int) -> int:
    """Let accelerate use the open group. Return the number of plans so far."""
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size}
    ranks["LOCAL_WORLD_SIZE"] = world_size
    os.environ.update({name: str(value) for name, value in ranks.items()})
    AcceleratorState._reset_state(reset_partial_state=True)
    transformers.utils.logging.set_verbosity_error()
    return distca.init().num_plans


def documents() -> datasets.Dataset:
    """Return mostly short documents and some long ones, so that batches differ in size."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(3, 40, (NUM_DOCUMENTS,), generator=generator)
    lengths[::9] *= 8
    ids = [torch.randint(0, pm.VOCAB_SIZE, (n,), generator=generator).tolist() for n in lengths]
    return datasets.Dataset.from_dict({"input_ids": ids})


def common_arguments(options: dict) -> dict:
    return {
        "output_dir": tempfile.mkdtemp(),
        "max_steps": NUM_STEPS,
        "logging_steps": 1,
        "learning_rate": 3e-3,
        "use_cpu": True,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        **options,
    }


def losses_of(trainer: transformers.Trainer) -> list[float]:
    """Train, and return the losses of every step, then those of the evaluations."""
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    history = trainer.state.log_history
    return [entry[key] for key in ("loss", "eval_loss") for entry in history if key in entry]


def run_trainer(
    rank: int, world_size: int, attention: str, name: str, collator: dict, options: dict
) -> tuple[list[float], int]:
    plans_before = join(rank, world_size)
    data = documents()
    trainer = transformers.Trainer(
        pm.with_attention(pm.model_of(name), attention),
        transformers.TrainingArguments(
            per_device_train_batch_size=3,
            per_device_eval_batch_size=2,
            eval_strategy="steps",
            eval_steps=NUM_STEPS // 2,
            **common_arguments(options),
        ),
        transformers.DataCollatorWithFlattening(**collator),
        train_dataset=data,
        eval_dataset=data.select(range(9)),
    )
    return losses_of(trainer), distca.init().num_plans - plans_before


def sft_trainer(model: transformers.PreTrainedModel, arguments: dict) -> trl.SFTTrainer:
    words = models.WordLevel({f"t{i}": i for i in range(pm.VOCAB_SIZE)}, unk_token="t0")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(words), eos_token="t1", pad_token="t2"
    )
    packing = {"packing": True, "max_length": 256, "per_device_train_batch_size": 1}
    return trl.SFTTrainer(
        model,
        trl.SFTConfig(**{**arguments, **packing, "bf16": False}),
        train_dataset=documents(),
        processing_class=tokenizer,
    )


def run_sft(rank: int, world_size: int, attention: str) -> tuple[list[float], int]:
    plans_before = join(rank, world_size)
    trainer = sft_trainer(pm.with_attention(pm.model_of("llama"), attention), common_arguments({}))
    return losses_of(trainer), distca.init().num_plans - plans_before


def run_fsdp2(
    rank: int, world_size: int, attention: str, precision: str, recompute: bool
) -> tuple[list[float], int]:
    plans_before = join(rank, world_size)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        activation_checkpointing=recompute,
    )
    accelerator = accelerate.Accelerator(cpu=True)
    # accelerate allows FSDP only on devices, though nothing in it needs one.
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    plugin.set_mixed_precision(precision)
    model = pm.with_attention(pm.model_of("llama", use_cache=False), attention)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    losses = []
    for step in range(6):
        lengths = pm.LENGTHS[(rank + step) % world_size]
        packed = pm.Packed.of(lengths, seed=10 * step + rank)
        loss = packed.loss(model(**packed.keywords()).logits.float()) / sum(lengths)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, distca.init().num_plans - plans_before


def batch_collator(seen: list, collate):
    """Return a collator that appends what it returns to `seen`."""

    def keeping(examples: list) -> dict:
        seen.append(collate(examples))
        return seen[-1]

    return keeping


class Gradients(transformers.TrainerCallback):
    """Collects the gradients of every step, as the optimizer sees them."""

    def __init__(self) -> None:
        self.steps: list[dict[str, torch.Tensor]] = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs) -> None:
        self.steps.append(
            {name.removeprefix("module."): p.grad.clone() for name, p in model.named_parameters()}
        )


def trainer_of(kind: str, name: str, options: dict) -> transformers.Trainer:
    """Return a Trainer or a packing SFTTrainer that trains by SGD. In ping-pong it is a Trainer."""
    arguments = common_arguments({"optim": "sgd", "max_grad_norm": 0.0, "max_steps": 4, **options})
    model = pm.with_attention(pm.model_of(name), "distca")
    if kind == "sft":
        return sft_trainer(model, arguments)
    return transformers.Trainer(
        ping_pong(model) if kind == "ping-pong" else model,
        transformers.TrainingArguments(per_device_train_batch_size=3, **arguments),
        transformers.DataCollatorWithFlattening(),
        train_dataset=documents(),
    )


def one_process(model, steps: list[list[dict]], learning_rates: list[float]) -> tuple[list, list]:
    """Train a copy of `model` with eager attention on the documents of every step, one by one.
    Return its losses and its gradients by step."""
    eager = pm.with_attention(model, "eager")
    losses, gradients = [], []
    for packs, learning_rate in zip(steps, learning_rates, strict=True):
        eager.zero_grad()
        total, num_predicted = torch.zeros(()), 0
        for pack in packs:
            begins = (pack["position_ids"][0] == 0).nonzero()[:, 0].tolist()
            lengths = torch.tensor([*begins, pack["input_ids"].shape[1]]).diff().tolist()
            for ids in pack["input_ids"].split(lengths, dim=1):
                logits = eager(input_ids=ids).logits[0, :-1]
                total = total + F.cross_entropy(logits, ids[0, 1:], reduction="sum")
                num_predicted += ids.shape[1] - 1
        loss = total / num_predicted
        loss.backward()
        losses.append(loss.item())
        gradients.append(pm.gradients(eager))
        with torch.no_grad():
            for parameter in eager.parameters():
                parameter -= learning_rate * parameter.grad
    return losses, gradients


def results_of_cut_batches(
    rank: int, world_size: int, kind: str, name: str, ranks_per_batch: int, options: dict
) -> dict:
    """Train on batches that are cut over ranks. Return the largest difference from one process in
    losses, relative to them, and in gradients, relative to their norms; also what was cut, and
    whether each plan was made ahead."""
    distca.close()  # an earlier model may have been in ping-pong
    join(rank, world_size)
    gradients, seen = Gradients(), []
    trainer = trainer_of(kind, name, options)
    trainer.add_callback(gradients)
    trainer.data_collator = batch_collator(seen, trainer.data_collator)
    plan_batches(trainer, ranks_per_batch)
    with recorded_plans() as are_ahead:
        losses = losses_of(trainer)
    rates = [each["learning_rate"] for each in trainer.state.log_history if "loss" in each]
    accumulated = trainer.args.gradient_accumulation_steps
    gathered = [None] * world_size
    dist.all_gather_object(gathered, seen[: accumulated * len(losses)])
    packs = gathered[::ranks_per_batch]
    steps = [
        [pack for batches in packs for pack in batches[i : i + accumulated]]
        for i in range(0, len(packs[0]), accumulated)
    ]
    true_losses, true_gradients = one_process(pm.model_of(name), steps, rates)
    errors = [abs(a - b) / b for a, b in zip(losses, true_losses, strict=True)]
    for own, truth in zip(gradients.steps, true_gradients, strict=True):
        errors += [((own[n] - truth[n]).norm() / truth[n].norm()).item() for n in truth]
    return {
        "error": max(errors),
        "same_batch": all(
            torch.equal(a["input_ids"], b["input_ids"])
            for group in range(0, world_size, ranks_per_batch)
            for other in gathered[group : group + ranks_per_batch]
            for a, b in zip(gathered[group], other, strict=True)
        ),
        "longest": max(int(each["position_ids"].max()) + 1 for each in seen),
        "tokens_per_rank": max(each["input_ids"].shape[1] for each in seen) // ranks_per_batch,
        "are_ahead": are_ahead,
        "in_halves": distca.init().cut is not None,
    }


def train_over(
    rank: int, world_size: int, ranks_per_batch: int, options: dict, has_bad_batch: bool = False
) -> None:
    """Train on cut batches. With `has_bad_batch`, those of the last rank do not say where documents
    begin."""
    join(rank, world_size)
    trainer = trainer_of("trainer", "llama", options)
    if has_bad_batch and rank == world_size - 1:
        trainer.data_collator = transformers.DataCollatorWithFlattening(return_position_ids=False)
    plan_batches(trainer, ranks_per_batch).train()
