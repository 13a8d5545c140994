"""The text of `python run.py --help`, made from the schema and from the first comment of each file in `conf/`."""

from __future__ import annotations

import textwrap
from pathlib import Path

from strata_jax.config.checks import allowed, show
from strata_jax.config.keys import Setting, all_settings

WIDTH = 110

INTRODUCTION = """\
strata-jax runs a qwen4exp mixture-of-experts model from a GGUF file and plans its memory: expert weights stay
packed in RAM, as many experts as fit live on the device, and a draft block makes decoding faster.

  python run.py [group=option ...] [key=value ...]

Examples
  python run.py                                                    a small built-in model; needs nothing else
  python run.py model.path=model.gguf workload.prompt="Hello"      your model, your prompt
  python run.py model.path=model.gguf workload.messages_file=chat.json workload.max_output_tokens=512
  python run.py model.path=model.gguf pipeline=plan                sizes and memory plan, header only
  python run.py pipeline=logits 'workload.token_ids=[1,2,3]'       logits.npy for token ids
  python run.py -m spec.window=1,2,4                               one run for each value
Every run leaves a directory in outputs/ with its settings, plan, events, metrics, text and summary.
A value with a comma, an equals sign or a space is quoted twice: 'model.path="/a b/c=1.gguf"'
"""

GROUP_ORDER = (
    "pipeline",
    "model",
    "workload",
    "hardware",
    "policy",
    "quant",
    "executor",
    "memory_model",
    "reproduce",
    "experiment",
)

FOOTER = """\
Hydra's own options
  -m try several values    --cfg job print all settings    --info where they come from    -sc install=bash completion
  hydra.run.dir=DIR where the run directory goes    --hydra-help the rest
Exit codes: 0 done, 2 a setting, a file or the memory does not allow it (message on stderr), 1 a bug, 130 interrupted.
"""


def help_text(conf: Path) -> str:
    """Return the whole help text. `conf` is the folder with the config groups."""
    parts = [INTRODUCTION, "Groups (group=option; * is the default)", *group_lines(conf), ""]
    parts += ["Settings (key=value)", *setting_lines(), "", FOOTER]
    return "\n".join(parts)


def group_lines(conf: Path) -> list[str]:
    """Return one line for each option of each group, from the first comment of its file."""
    defaults = {line.strip() for line in (conf / "config.yaml").read_text(encoding="utf-8").splitlines()}
    lines: list[str] = []
    for group in GROUP_ORDER:
        options = sorted((conf / group).glob("*.yaml"))
        for path in options:
            mark = "*" if f"- {group}: {path.stem}" in defaults else " "
            lines.append(f" {mark} {group + '=' + path.stem:<28} {first_comment(path)}")
        if not options:
            lines.append(f"   {group + '=':<28} none in this version")
    return lines


def setting_lines() -> list[str]:
    """Return the settings that this version honours, with default, help and range; the rest in one line."""
    lines: list[str] = []
    later: list[str] = []
    for setting in all_settings().values():
        if setting.field.metadata["available"] is True:
            lines += _describe(setting)
        elif setting.field.metadata["available"] is False:
            later.append(setting.name)
    nodes = dict.fromkeys(".".join(name.split(".")[:-1]) for name in later)
    closing = "Names kept for later versions (only their default is accepted): " + ", ".join(
        f"{node}.{{{', '.join(name.rsplit('.', 1)[-1] for name in later if name.rsplit('.', 1)[0] == node)}}}"
        for node in nodes
    )
    return [
        *lines,
        *textwrap.wrap(closing, WIDTH, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False),
    ]


def first_comment(path: Path) -> str:
    """Return the first comment of a YAML file that is not a package line."""
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("#") and not line.startswith("# @package"):
            return line.lstrip("# ")
    return ""


def _describe(setting: Setting) -> list[str]:
    head = f"  {setting.name}={show(setting.default)}"
    text = f"{setting.help_text} [{allowed(setting)}]"
    body = textwrap.wrap(text, WIDTH - 38, break_on_hyphens=False)
    first = f"{head:<37} {body[0]}" if len(head) < 37 else head
    rest = body[1:] if len(head) < 37 else body
    return [first, *(" " * 38 + line for line in rest)]
