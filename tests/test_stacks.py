"""The recipes of docs/recipes.md train on two CPU processes, with the losses of SDPA.

Each stack needs an environment of its own (`make test-stacks`); its test skips where it is missing.
"""

import importlib.util
import json
import os
import re
import shlex
import sys
from pathlib import Path

import pytest
import torch
from processes import run_command

for library in ("transformers", "datasets"):
    pytest.importorskip(library, reason=f"needs {library}, and this environment has none")

import datasets  # noqa: E402
import transformers  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402

ROOT = Path(__file__).parent.parent
PROJECT = (ROOT / "pyproject.toml").read_text()
FENCED = re.DOTALL | re.MULTILINE
LARGEST_DIFFERENCE = 1e-4  # of two losses in float32
NUM_STEPS = 5
TIMEOUT_S = 240
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}"
)


def text(num_characters: int, generator: torch.Generator) -> str:
    letters = torch.randint(ord("a"), ord("z") + 1, (num_characters,), generator=generator)
    return "".join(map(chr, letters.tolist()))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Return a folder with a tiny Qwen 2, its tokenizer of bytes, and chats of unequal lengths."""
    path = tmp_path_factory.mktemp("stack")
    symbols = SPECIAL + sorted(pre_tokenizers.ByteLevel.alphabet())
    words = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(symbols)}, []))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = {"pad_token": SPECIAL[0], "eos_token": SPECIAL[2]}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, **special)
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL[1:2]})
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    config = transformers.Qwen2Config(
        vocab_size=len(symbols),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.2,
        **{"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 2},
    )
    torch.manual_seed(0)
    transformers.Qwen2ForCausalLM(config).save_pretrained(path)
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(3, 40, (120,), generator=generator)
    lengths[::9] *= 6
    chats = [
        [
            {"role": "user", "content": text(3, generator)},
            {"role": "assistant", "content": text(int(length), generator)},
        ]
        for length in lengths
    ]
    rows = [{"messages": chat} for chat in chats]
    (path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    datasets.Dataset.from_list(rows).to_parquet(str(path / "data.parquet"))
    return path


def section(title: str) -> str:
    page = (ROOT / "docs" / "recipes.md").read_text()
    return re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", page, FENCED)[1]


def command_of(title: str) -> list[str]:
    """Return the words of a recipe's command that follow torchrun's own."""
    block = re.search(r"^```\n(.*?)^```", section(title), FENCED)[1]
    torchrun, gpus, num_gpus, *words = shlex.split(block.replace("\\\n", ""))
    assert (torchrun, gpus, num_gpus) == ("torchrun", "--nproc-per-node", "8")
    return words


def train(words: list, way: str, folder: Path) -> None:
    """Run a recipe's command on two processes. Assert that distca balanced attention if `way` says
    so."""
    offline = {"HF_HUB_OFFLINE": "1", "MODELSCOPE_CACHE": str(folder), "OMP_NUM_THREADS": "1"}
    offline |= {"HF_HOME": str(folder / "hf"), "AXOLOTL_DO_NOT_TRACK": "1"}
    offline |= {"ACCELERATE_USE_CPU": "true"}
    paths = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(folder), *sys.path])}
    verl = {"VERL_ENGINE_DEVICE": "cuda", "VERL_FILE_LOGGER_PATH": str(folder / f"{way}.jsonl")}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    script = ["--nproc-per-node", "2", ROOT / "tests" / "stack_script.py", way]
    result = run_command(
        [*torchrun, *script, *words],
        cwd=folder,
        env={**os.environ, **offline, **paths, **verl},
        timeout_s=TIMEOUT_S,
    )
    assert result.returncode == 0, result.stderr[-5000:]
    assert result.stdout.count(f"balanced {way == 'distca'}") == 2


def losses_in(path: Path) -> list[float]:
    """Return the losses in a log of JSON lines."""
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    entries = [entry.get("data", entry) for entry in entries]
    return [each[key] for each in entries for key in ("loss", "train/loss") if key in each]


def swift(way: str, folder: Path) -> list[float]:
    out = folder / way
    short = {
        **{"model": folder, "dataset": folder / "data.jsonl", "output_dir": out},
        **{"model_type": "qwen2", "template": "chatml", "tuner_type": "full"},
        **{"torch_dtype": "float32", "max_length": 256, "split_dataset_ratio": 0},
        **{"max_steps": NUM_STEPS, "logging_steps": 1, "learning_rate": 1e-3, "use_cpu": True},
        **{"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1},
        **{"save_strategy": "no", "report_to": "none"},
    }
    words = command_of("ms-swift")
    train([*words, *(word for name in short for word in (f"--{name}", short[name]))], way, folder)
    (log,) = out.rglob("logging.jsonl")
    return losses_in(log)


def llamafactory(way: str, folder: Path) -> list[float]:
    yaml = pytest.importorskip("yaml")
    columns = {"columns": {"messages": "messages"}, "formatting": "sharegpt"}
    tags = {"role_tag": "role", "content_tag": "content"}
    tags |= {"user_tag": "user", "assistant_tag": "assistant"}
    info = {"chats": {"file_name": "data.jsonl", **columns, "tags": tags}}
    (folder / "dataset_info.json").write_text(json.dumps(info))
    settings = re.search(r"^```yaml\n(.*?)^```", section("LLaMA-Factory"), FENCED)
    short = {
        **{"model_name_or_path": str(folder), "dataset_dir": str(folder), "dataset": "chats"},
        **{"template": "qwen", "finetuning_type": "full", "cutoff_len": 256, "use_cpu": True},
        **{"max_steps": NUM_STEPS, "logging_steps": 1, "learning_rate": 1e-3, "bf16": False},
        **{"output_dir": str(folder / way), "save_strategy": "no", "report_to": "none"},
    }
    (folder / "train.yaml").write_text(yaml.safe_dump({**yaml.safe_load(settings[1]), **short}))
    train(command_of("LLaMA-Factory"), way, folder)
    return losses_in(folder / way / "trainer_log.jsonl")


def axolotl(way: str, folder: Path) -> list[float]:
    yaml = pytest.importorskip("yaml")
    settings = re.search(r"^```yaml\n(.*?)^```", section("axolotl"), FENCED)
    out = folder / way
    chats = {"path": str(folder / "data.jsonl"), "ds_type": "json", "type": "chat_template"}
    short = {
        **{"base_model": str(folder), "datasets": [{**chats, "field_messages": "messages"}]},
        **{"chat_template": "tokenizer_default", "sequence_len": 256, "val_set_size": 0},
        **{"max_steps": NUM_STEPS, "save_steps": NUM_STEPS, "logging_steps": 1, "num_epochs": 1},
        **{"learning_rate": 1e-3, "optimizer": "adamw_torch", "lr_scheduler": "constant"},
        **{"bf16": False, "tf32": False, "gradient_accumulation_steps": 1, "ddp_backend": "gloo"},
        **{"seed": 0, "pad_to_sequence_len": False, "gradient_checkpointing": False},
        **{"output_dir": str(out), "dataset_prepared_path": str(out / "prepared")},
    }
    (folder / "train.yaml").write_text(yaml.safe_dump({**yaml.safe_load(settings[1]), **short}))
    train(command_of("axolotl"), way, folder)
    state = json.loads((out / f"checkpoint-{NUM_STEPS}" / "trainer_state.json").read_text())
    return [each["loss"] for each in state["log_history"] if "loss" in each]


def verl(way: str, folder: Path) -> list[float]:
    words = command_of("verl")
    if way == "torch":
        words = [word.replace("=distca", "=flash_attention_2") for word in words]
    entry = re.search(r'^\[project.entry-points."(verl.plugins)"\]\n(.*?)\n\n', PROJECT, FENCED)
    metadata = folder / "plugin.dist-info"  # as an installation writes it
    metadata.mkdir(exist_ok=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(f"[{entry[1]}]\n{entry[2]}\n".replace('"', ""))
    precision = "{param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}"
    short = [
        *(f"data.train_files={folder}/data.parquet", "data.train_batch_size=12"),
        *("data.max_token_len_per_gpu=512", "data.max_length=512", "data.num_workers=0"),
        *("data.ignore_input_ids_mismatch=True", f"model.path={folder}"),
        *(
            "engine.model_dtype=fp32",
            "engine.dtype=float32",
            f"+engine.mixed_precision={precision}",
        ),
        *("engine.use_torch_compile=False", "trainer.device=cpu", "trainer.n_gpus_per_node=2"),
        *("trainer.logger=[file]", f"trainer.total_training_steps={NUM_STEPS}"),
        *(f"trainer.default_local_dir={folder / way}", "trainer.resume_mode=disable"),
    ]
    train([*words, *short], way, folder)
    return losses_in(folder / f"{way}.jsonl")


@pytest.mark.parametrize(
    "stack", [swift, llamafactory, axolotl, verl], ids=lambda stack: stack.__name__
)
def test_recipe(stack, folder):
    name = stack.__name__
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"needs {name}, and this environment has none")
    ours, torchs = (stack(way, folder) for way in ("distca", "torch"))
    assert len(ours) == len(torchs) == NUM_STEPS
    assert max(ours) - min(ours) > 100 * LARGEST_DIFFERENCE, "nothing was learned"
    differences = [abs(a - b) for a, b in zip(ours, torchs, strict=True)]
    assert max(differences) <= LARGEST_DIFFERENCE
