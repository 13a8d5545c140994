"""The text of `python run.py --help`, made from the schema and from the first comment of each file in `conf/`."""

from __future__ import annotations

import textwrap
from pathlib import Path

from strata_jax.config.checks import allowed, show
from strata_jax.config.keys import Setting, all_settings

WIDTH = 110

INTRODUCTION = """\
strata-jax plans the memory of qwen4exp mixture-of-experts models and runs them: expert weights stay packed in RAM, as
many experts as fit live on the device, a draft block makes decoding faster. A card that is not here is simulated.

  python run.py [group=option ...] [key=value ...]

Examples
  python run.py                                                    a small built-in model; needs nothing else
  python run.py model.path=model.gguf workload.prompt="Hello"      your model, your prompt
  python run.py model.path=model.gguf workload.messages_file=chat.json workload.max_output_tokens=512
  python run.py model.path=model.gguf pipeline=plan                sizes and memory plan, header only
  python run.py pipeline=logits 'workload.token_ids=[1,2,3]'       logits.npy for token ids
  python run.py hardware=rtx5090 policy=kv_grow                    simulate a card: no GPU, no weights
  python run.py hardware=rtx3090 pipeline=plan                     only the plan for that card
  python run.py hardware=rtx3090 model.path=model.gguf             simulate your file there, from its header
  python run.py -m hardware=rtx5090 policy=baseline,all            one run for each value: sweep.md and pictures
  python run.py experiment=grid                                    1,000 simulations in one job
  python run.py reproduce=kv_grow                                  a published table: theirs, ours, error
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
  hydra/launcher=joblib one process for each job of -m    hydra/launcher=ray over machines
  -m ... hydra.sweep.dir=DIR sweep.resume=true go on with a sweep
Exit codes: 0 done, 2 a setting, a file or the memory does not allow it (message on stderr), 1 a bug, 130 interrupted.
"""


def help_text(conf: Path) -> str:
    """Return the whole help text. `conf` is the folder with the config groups."""
    parts = [INTRODUCTION, "Groups (group=option; * is the default)", *group_lines(conf), ""]
    parts += ["Settings (key=value)", *setting_lines(), "", FOOTER]
    return "\n".join(parts)


def group_lines(conf: Path) -> list[str]:
    """Return one line for each option of each group, from the first comment of its file."""
    lines_of_defaults = (conf / "config.yaml").read_text(encoding="utf-8").splitlines()
    defaults = {line.partition("#")[0].strip() for line in lines_of_defaults}
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
    """Return the settings with default, help and range; those that one executor honours say so."""
    return [line for setting in all_settings().values() for line in _describe(setting)]


def first_comment(path: Path) -> str:
    """Return the first comment of a YAML file that is not a package line."""
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("#") and not line.startswith("# @package"):
            return line.lstrip("# ")
    return ""


def _describe(setting: Setting) -> list[str]:
    head = f"  {setting.name}={show(setting.default)}"
    executors = setting.field.metadata["executors"]
    only = "" if len(executors) > 1 else f"; only executor={executors[0]}"
    text = f"{setting.help_text} [{allowed(setting)}{only}]"
    body = textwrap.wrap(text, WIDTH - 38, break_on_hyphens=False)
    first = f"{head:<37} {body[0]}" if len(head) < 37 else head
    rest = body[1:] if len(head) < 37 else body
    return [first, *(" " * 38 + line for line in rest)]
