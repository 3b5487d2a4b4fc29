"""Run torchtitan's trainer on its small Llama, with varlen attention balanced by distca.

    torchrun --nproc-per-node 2 examples/torchtitan_train.py --steps 20

The script needs CUDA devices and a PyTorch that torchtitan supports. For comparison, --attention
own runs torchtitan's own attention. The documents are parts of Python's standard library and a
token is a byte, so nothing is downloaded. All other flags go to torchtitan, for example

    --training.seq_len 32768 --training.local_batch_size 1 --parallelism.tensor_parallel_degree 2
"""

import argparse
import json
import os
import random
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import stdlib_corpus
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

MODULE = "distca.integrations.torchtitan"
OVERRIDES = ",".join(
    f"{MODULE}.{name}" for name in ("varlen_attention", "selective_checkpoint", "metrics")
)
BEGIN, END = "<begin>", "<end>"


def arguments() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--attention", choices=("distca", "own"), default="distca")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("runs/torchtitan"))
    return parser.parse_known_args()


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer with one token per byte in torchtitan's format."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({each: i for i, each in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([BEGIN, END])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": BEGIN, "eos_token": END}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def write_documents(folder: Path) -> None:
    texts = [part.decode("utf-8", "ignore") for part in stdlib_corpus.all_documents()]
    random.Random(0).shuffle(texts)
    lines = (json.dumps({"text": text}) for text in texts if text)
    (folder / "documents.json").write_text("\n".join(lines))


def titan_flags(args: argparse.Namespace, folder: Path) -> list[str]:
    """Return torchtitan's flags for a run with the tokenizer and documents in `folder`."""
    flags = [
        *("--module", "llama3", "--config", "llama3_debugmodel_varlen_attn"),
        *("--training.steps", str(args.steps)),
        *("--hf_assets_path", str(folder / "tokenizer")),
        *("--dataloader.dataset_path", str(folder / "documents")),
        *("--dump_folder", str(args.out)),
    ]
    return flags + (["--override.imports", OVERRIDES] if args.attention == "distca" else [])


def prepare(folder: Path) -> None:
    for part, write in (("tokenizer", write_tokenizer), ("documents", write_documents)):
        (folder / part).mkdir(parents=True, exist_ok=True)
        write(folder / part)


def trainer() -> Callable[[], None]:
    """Return the main function of torchtitan's trainer. Raises ImportError naming the PyTorch that
    it needs if this one is too old."""
    try:
        from torchtitan import train
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "torch":
            raise
        raise ImportError(
            f"torchtitan {metadata.version('torchtitan')} does not run on PyTorch "
            f"{torch.__version__}; it needs one newer than 2.11: {error}"
        ) from error
    return train.main


def main() -> None:
    args, others = arguments()
    train = trainer()
    folder = args.out / f"assets-{os.environ.get('RANK', '0')}"  # per rank, so that none waits
    prepare(folder)
    sys.argv = [sys.argv[0], *titan_flags(args, folder), *others]
    train()


if __name__ == "__main__":
    main()
