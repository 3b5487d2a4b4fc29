"""Write the generated pages and pictures of docs/: python docs/generate.py

options.md and api.md come from docstrings; tests/test_docs.py checks that they are up to date. With
--pictures, distca's own commands draw docs/pictures, and this script reduces the number of colours.
"""

import argparse
import ast
import dataclasses
import inspect
import re
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import distca
from distca import options, run

DOCS = Path(__file__).parent
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
PICTURES = {  # name: arguments of Python, and the picture that they write to the folder --out
    "balance.png": (
        [*TORCHRUN, "4", "examples/train.py", "--steps", "20", "--tokens-per-rank", "2048"],
        "balance.png",
    ),
    "timeline.png": (
        [
            *("-m", "distca.simulate", "--distribution", "lognormal:3000:1.4", "--ranks", "8"),
            *("--model", "8B", "--tokens", "65536", "--steps", "3"),
            *("--systems", "fixed", "distca", "distca-ping-pong", "limit"),
        ],
        "timeline.png",
    ),
}
NUM_COLORS = 160
COLUMNS = 100

OPTIONS_HEAD = """\
# Options

`distca.Options` configures balanced attention. Its fields are flags of the launcher:

```
torchrun --nproc-per-node 8 -m distca.run --tolerance 0.05 --log-every 10 train.py ...
```

or `distca.init(options=distca.Options(tolerance=0.05))`, or `distca.configure(options)` before
anything else opens the group. They must be equal on all ranks of a group. No environment variable
changes what distca does. `python docs/generate.py` writes this page.
"""
SETTINGS = {  # text before the table of each dataclass
    distca.Options: "",
    distca.Watching: """
## Records

`distca.Watching` configures logs and records of a run. Its fields are flags of the launcher too;
in Python, pass it as `watching` to `distca.init` or `distca.configure`.
""",
    run.Launch: """
## Scripts that do not call distca

`distca.run.Launch` has the launcher's own options.
""",
}
TABLE_HEAD = """
| flag | default | meaning |
| --- | --- | --- |
"""
ORDER = [  # of use
    *("init", "Documents", "plan", "core_attention", "documents", "scaled_dot_product_attention"),
    *("varlen_attention", "max_logits", "join", "shard_batch", "ShardedBatch", "PingPong", "Plan"),
    *("PlanReport", "close", "serve", "configure", "Options", "Watching", "AttentionShape"),
]
INTEGRATIONS = {  # read from their sources: the libraries need not be installed
    "transformers": ("latest_plan", "ping_pong"),
    "trainer": ("plan_batches",),
    "fsdp": ("gather_after_attention",),
    "torchtitan_pipelines": ("pooled",),
    "megatron": ("install",),
    "megatron_batches": ("packed_seq_params", "plan_ahead"),
}
INTERNALS = {  # members that users have no need of
    "Documents": ("unplanned", "halves", "pieces"),
    "Plan": ("solution",),
    "AttentionShape": (
        *("from_words", "tensor_row_bytes", "row_bytes", "least_bytes", "pair_flops", "tile_flops"),
    ),
}
API_HEAD = """\
# API

The names that `import distca` offers in the order of use, then the functions of the integrations,
with their docstrings. `python docs/generate.py` writes this page. Shapes: `q [tokens, heads_q,
head_dim]`, `k [tokens, heads_kv, head_dim]`, `v [tokens, heads_kv, head_dim_v]`. Rows are packed,
without padding.
"""
API_FOOT = """\
Errors name the argument, its value and what to do; [troubleshooting.md](troubleshooting.md) has
them by message.
"""


def options_page() -> str:
    page = OPTIONS_HEAD
    for kind, head in SETTINGS.items():
        texts = options.field_help(kind)
        page += head + TABLE_HEAD
        for field in dataclasses.fields(kind):
            flag = "--" + field.name.replace("_", "-")
            both = f"`{flag}`, `--no-{flag[2:]}`" if field.type is bool else f"`{flag}`"
            page += f"| {both} | `{field.default}` | {texts[field.name]} |\n"
    return page


def api_page() -> str:
    parts = [API_HEAD]
    for name in sorted(distca.__all__, key=ORDER.index):
        parts.append(_entry(f"distca.{name}", getattr(distca, name)))
    for module, names in INTEGRATIONS.items():
        parts += _functions(f"distca.integrations.{module}", names)
    return "\n".join([*parts, API_FOOT])


def _functions(module: str, names: tuple[str, ...]) -> list[str]:
    """Return the entries of a module's functions, from its source."""
    path = (DOCS.parent / module.replace(".", "/")).with_suffix(".py")
    body = [each for each in ast.parse(path.read_text()).body if isinstance(each, ast.FunctionDef)]
    by_name, parts = {each.name: each for each in body}, []
    for name in names:
        function = by_name[name]
        for argument in (*function.args.args, *function.args.kwonlyargs):
            argument.annotation = None
        call = f"{module}.{name}({ast.unparse(function.args)})"
        parts.append(
            f"## {module}.{name}\n\n```python\n{call}\n```\n\n{ast.get_docstring(function)}\n"
        )
    return parts


def _entry(name: str, thing) -> str:
    head = f"## {name}\n\n"
    if not inspect.isclass(thing):
        return f"{head}```python\n{_signature(name, thing)}\n```\n\n{inspect.getdoc(thing)}\n"
    text = head + f"{inspect.getdoc(thing)}\n"
    if thing in SETTINGS:
        return text + "\nFields: [options.md](options.md).\n"
    if dataclasses.is_dataclass(thing):
        texts = options.field_help(thing)
        fields = (
            _wrapped(f"- `{field.name}`: {texts.get(field.name, '')}".rstrip(": "), "  ")
            for field in dataclasses.fields(thing)
        )
        text += "\n" + "\n".join(fields) + "\n"
    for key, value in vars(thing).items():
        documented = value.fget if isinstance(value, property) else getattr(thing, key)
        if not _is_shown(thing, key) or not getattr(documented, "__doc__", None):
            continue
        if isinstance(value, property):
            text += _member(f".{key}", documented)
        elif callable(documented):
            shown = name if key == "__init__" else f".{key}"
            text += _member(_signature(shown, documented), documented)
    return text


def _is_shown(thing: type, key: str) -> bool:
    """Return whether users call this member of a class. They call explicit constructors."""
    if key == "__init__":
        return not dataclasses.is_dataclass(thing) and "__new__" not in vars(thing)
    return not key.startswith("_") and key not in INTERNALS.get(thing.__name__, ())


def _member(title: str, documented) -> str:
    """Return the entry of a member. Its first paragraph starts on the line of the title."""
    first, *rest = inspect.getdoc(documented).split("\n\n")
    return "\n" + "\n\n".join([_wrapped(f"**`{title}`** {first}"), *rest]) + "\n"


def _wrapped(text: str, indent: str = "") -> str:
    """Wrap text at COLUMNS and keep code spans on one line."""
    spaced = re.sub(r"`[^`]*`", lambda span: span[0].replace(" ", "\0"), " ".join(text.split()))
    lines = textwrap.wrap(
        spaced,
        COLUMNS,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(lines).replace("\0", " ")


def _signature(name: str, function) -> str:
    """Return the call without types, because the docstring states them in words."""
    parameters = inspect.signature(function).parameters.values()
    untyped = [each.replace(annotation=inspect.Parameter.empty) for each in parameters]
    untyped = [each for each in untyped if each.name != "self"]
    return f"{name}{inspect.Signature(untyped)}"


def draw_pictures() -> None:
    from PIL import Image

    for name, (arguments, drawn) in PICTURES.items():
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, *arguments, "--out", folder]
            subprocess.run(command, check=True, cwd=DOCS.parent)
            picture = Image.open(Path(folder) / drawn).convert("RGB")
        picture.thumbnail((1400, 1400))
        picture.quantize(NUM_COLORS).save(DOCS / "pictures" / name, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pictures", action="store_true", help="also draw the pictures (a minute)")
    args = parser.parse_args()
    (DOCS / "options.md").write_text(options_page())
    (DOCS / "api.md").write_text(api_page())
    if args.pictures:
        draw_pictures()


if __name__ == "__main__":
    main()
