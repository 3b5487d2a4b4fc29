"""Training runs on one rank of a gloo group: transformers' Trainer, TRL's SFTTrainer, FSDP2.

Each run returns this rank's losses and its number of plans.
"""

import os
import tempfile

import accelerate
import datasets
import packed_models as pm
import torch
import transformers
import trl
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from tokenizers import Tokenizer, models

import distca

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


def run_sft(rank: int, world_size: int, attention: str) -> tuple[list[float], int]:
    plans_before = join(rank, world_size)
    words = models.WordLevel({f"t{i}": i for i in range(pm.VOCAB_SIZE)}, unk_token="t0")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(words), eos_token="t1", pad_token="t2"
    )
    trainer = trl.SFTTrainer(
        pm.with_attention(pm.model_of("llama"), attention),
        trl.SFTConfig(
            per_device_train_batch_size=1,
            packing=True,
            max_length=256,
            **common_arguments({"bf16": False}),
        ),
        train_dataset=documents(),
        processing_class=tokenizer,
    )
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
