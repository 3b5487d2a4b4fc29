"""Train a small Llama with transformers' Trainer on packed documents, balanced by distca.

    torchrun --nproc-per-node 2 examples/transformers_finetune.py --steps 20 --out runs/transformers

The script runs on the CPU (gloo, float32) and on CUDA devices (NCCL, bfloat16). The model is built
from its configuration and the documents are parts of Python's standard library, so nothing is
downloaded. Only --attention and the import of distca differ from a run without distca.
"""

import argparse
import gc
import random
import statistics
from pathlib import Path

import stdlib_corpus
import torch
import torch.distributed as dist
from transformers import (
    DataCollatorWithFlattening,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import distca
from distca.integrations.transformers import latest_plan  # registers attn_implementation="distca"

LONGEST = 4096  # tokens of a document


def arguments(description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--attention", default="distca", help="or sdpa, eager for comparison")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--documents-per-rank", type=int, default=4, help="in each step")
    parser.add_argument("--out", type=Path, default=Path("runs/transformers"))
    return parser.parse_args()


def documents(num_documents: int) -> list[dict[str, list[int]]]:
    """Draw documents with a byte per token. All ranks have the same list, and the Trainer deals
    it out."""
    corpus = [each for each in stdlib_corpus.all_documents() if len(each) > 1]
    drawn = random.Random(0).choices(corpus, k=num_documents)
    return [{"input_ids": list(document[:LONGEST])} for document in drawn]


def build_model(attention: str) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=stdlib_corpus.VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=224,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation=attention,
        use_cache=False,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


class Balance(TrainerCallback):
    """Collects the report of every step's plan."""

    def __init__(self) -> None:
        self.reports: list[distca.PlanReport] = []

    def on_step_end(self, args, state, control, **kwargs) -> None:
        if latest_plan() is not None:
            self.reports.append(latest_plan().report())


def closing_lines(trainer: Trainer, balance: Balance) -> str:
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    lines = [f"loss {losses[0]:.3f} -> {losses[-1]:.3f}"]
    if balance.reports:
        before = statistics.fmean(each.imbalance_before for each in balance.reports)
        after = statistics.fmean(each.imbalance_after for each in balance.reports)
        lines.append(
            f"imbalance {before:.3f} -> {after:.3f} (predicted max/mean attention time of the "
            "ranks, mean of steps)"
        )
    return "\n".join(lines)


def end(closing: str) -> None:
    if closing:
        print(closing)
    distca.close()
    gc.collect()  # the Trainer's cycles would keep the group and gloo's threads alive until exit
    if dist.is_initialized():
        dist.destroy_process_group()


def train(args: argparse.Namespace) -> str:
    """Train and return the closing lines on rank 0."""
    on_cpu = not torch.cuda.is_available()
    balance = Balance()
    trainer = Trainer(
        build_model(args.attention),
        TrainingArguments(
            output_dir=str(args.out),
            max_steps=args.steps,
            per_device_train_batch_size=args.documents_per_rank,
            learning_rate=3e-3,
            bf16=not on_cpu,
            use_cpu=on_cpu,
            ddp_find_unused_parameters=False,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        ),
        DataCollatorWithFlattening(),
        train_dataset=documents(args.steps * args.documents_per_rank * 8),
        callbacks=[balance],
    )
    trainer.train()
    return closing_lines(trainer, balance) if trainer.is_world_process_zero() else ""


def main() -> None:
    end(train(arguments(__doc__)))


if __name__ == "__main__":
    main()
