"""Settings of what is done: workload, pipeline, reproduction, dense grids, sweeps, pictures."""

from __future__ import annotations

from dataclasses import dataclass

from strata_jax.config.choices import Batching, PipelineName
from strata_jax.config.fields import AUTO, IN_SIM, ON_DEVICE, setting


@dataclass
class WorkloadConfig:
    name: str = setting("doc_18k_small", "which requests to run; see data/workloads.yaml")
    prompt: str | None = setting(None, "text of one user message")
    prompt_file: str | None = setting(None, "file with the text of one user message")
    messages_file: str | None = setting(None, "JSON file: a list of {role, content} messages")
    token_ids: list[int] | None = setting(None, "token ids of the prompt, as they are")
    token_ids_file: str | None = setting(None, "file with the token ids: JSON list, or numbers between spaces, or .npy")
    prompt_tokens: int | None = setting(
        None, "one prompt of this many tokens, whatever they are", unit="tokens", low=1, high=16_777_216,
        executors=IN_SIM,
    )  # fmt: skip
    forced_token_ids: list[int] | None = setting(
        None, "continuation to force after the prompt, one step each, no drafts"
    )
    records: int | None = setting(None, "records of a document workload; null: as published", low=1, high=1_000_000)
    requests: int = setting(1, "times the list of requests is run", low=1, high=1_000_000)
    apply_chat_template: bool = setting(True, "render a prompt as a user message; false: continue the bare text")
    enable_thinking: bool = setting(False, "chat template option: let the model think first")
    reasoning_effort: str | None = setting(None, "chat template option, passed on as it is")
    max_output_tokens: int | str = setting(
        AUTO, "tokens to generate; auto: as published, else 128", unit="tokens", low=1, high=1_048_576
    )
    temperature: float = setting(0.0, "0: greedy, else the sampling temperature", low=0.0, high=100.0)
    top_k: int = setting(0, "keep the k likeliest tokens; 0: all", low=0, high=16_777_216)
    top_p: float = setting(1.0, "keep the likeliest tokens up to this probability", low=1e-6, high=1.0)
    min_p: float = setting(0.0, "drop tokens below this share of the likeliest", low=0.0, high=1.0)
    seed: int = setting(0, "seed of the sampler, and of simulated request sizes", low=0, high=4_294_967_295)
    stop: list[str] = setting([], "texts that end the output and are not shown", executors=ON_DEVICE)
    ignore_eos: bool = setting(False, "go on after an end token", executors=ON_DEVICE)
    batching: Batching = setting(
        Batching.chunk, "pipeline=logits: read the prompt in chunks or token by token", executors=ON_DEVICE
    )


@dataclass
class PipelineConfig:
    name: PipelineName = setting(PipelineName.generate, "what to do")


@dataclass
class ReproduceConfig:
    name: str | None = setting(None, "which published tables; `reproduce=NAME` sets it and the pipeline")
    tables: list[str] = setting([], "names of the published sources to repeat; empty: all of them")
    cases: list[str] = setting([], "only these cases of the published rows; empty: all")
    holdout: bool = setting(False, "also fit without each table in turn and report the error on it")
    bootstrap_samples: int = setting(2000, "resamples of the agent loop's intervals", low=0, high=1_000_000)


@dataclass
class GridConfig:
    axes: list[str] = setting(
        [], "pipeline=grid: settings and their values as -m takes them, such as 'prefill.chunk=256,512' or 'policy=a,b'"
    )
    skip: list[str] = setting([], "combinations to leave out, such as 'policy=head_alias cache.slots=5400'")
    plot_y: list[str] = setting(["prompt_tok_s", "decode_tok_s"], "columns to plot")


@dataclass
class SweepConfig:
    unfit_is_error: bool = setting(True, "a job that does not fit makes the sweep's exit status 2; false: 0")
    resume: bool = setting(False, "with hydra.sweep.dir=DIR: jobs of DIR that finished with equal settings are kept")
    plots: bool = setting(True, "draw speed against every setting that varies")


@dataclass
class ReportConfig:
    plots: bool | str = setting(AUTO, "draw memory.svg; auto: for single runs, not for the jobs of a sweep")
