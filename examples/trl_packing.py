"""Train a small Llama with TRL's SFTTrainer on packed documents, balanced by distca.

    torchrun --nproc-per-node 2 examples/trl_packing.py --steps 20 --out runs/trl

Model, documents and closing lines are those of transformers_finetune.py. TRL packs the documents.
The script runs on the CPU (gloo, float32) and on CUDA devices (NCCL, bfloat16), and downloads
nothing.
"""

import argparse

import datasets
import torch
from stdlib_corpus import VOCAB_SIZE
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from transformers_finetune import Balance, arguments, build_model, closing_lines, documents, end
from trl import SFTConfig, SFTTrainer

PACK_TOKENS = 4096


def tokenizer_of_bytes() -> PreTrainedTokenizerFast:
    """Return a tokenizer for SFTTrainer. It is unused, because documents are already tokens."""
    vocabulary = {f"<{byte}>": byte for byte in range(VOCAB_SIZE)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<0>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<0>", pad_token="<1>")


def train(args: argparse.Namespace) -> str:
    """Train and return the closing lines on rank 0."""
    on_cpu = not torch.cuda.is_available()
    balance = Balance()
    trainer = SFTTrainer(
        build_model(args.attention),
        SFTConfig(
            output_dir=str(args.out),
            max_steps=args.steps,
            per_device_train_batch_size=1,
            packing=True,
            max_length=PACK_TOKENS,
            learning_rate=3e-3,
            bf16=not on_cpu,
            use_cpu=on_cpu,
            ddp_find_unused_parameters=False,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=datasets.Dataset.from_list(documents(args.steps * 64)),
        processing_class=tokenizer_of_bytes(),
        callbacks=[balance],
    )
    trainer.train()
    return closing_lines(trainer, balance) if trainer.is_world_process_zero() else ""


def main() -> None:
    end(train(arguments(__doc__)))


if __name__ == "__main__":
    main()
