"""The ``headrace`` command.

Each command loads and checks the configuration, then imports what does the work, so that help and
configuration mistakes take no time. Exit statuses: 0 success, 2 input a person can mend, 130 or 143
stopped by Ctrl-C or SIGTERM, 1 a failure of ours.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from cluster.config import Config

EXIT_FAILED, EXIT_INPUT = 1, 2

app = typer.Typer(
    name="headrace",
    help="Asynchronous reinforcement learning of language-model agents.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    epilog="Exit status: 0 success; 2 a mistake that one line names, such as in the configuration; "
    "130 or 143 stopped by Ctrl-C or SIGTERM; 1 anything else, with a traceback unless a service died.",
    rich_markup_mode="rich",
)

ConfigPath = Annotated[
    Path,
    typer.Argument(metavar="CONFIG", help="YAML configuration, such as configs/quickstart.yaml.", show_default=False),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE", help="Dotted overrides, such as learner.steps=50 run.name=x.", show_default=False
    ),
]


@app.callback(invoke_without_command=True)
def headrace(
    show_version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Asynchronous reinforcement learning of language-model agents."""
    if show_version:
        from importlib.metadata import PackageNotFoundError, version

        try:
            typer.echo(f"headrace {version('headrace')}")
        except PackageNotFoundError:  # run as `python -m cluster` from a checkout
            typer.echo("headrace (not installed)")
        raise typer.Exit()


@app.command()
def train(config: ConfigPath, overrides: Overrides = None) -> None:
    """Train an agent: warm start, evaluation, reinforcement learning, evaluation.

    Everything the run keeps is in [bold]runs/NAME/[/]. Ctrl-C stops it after the step in hand and
    saves; [bold]run.resume=true[/] goes on from there. [bold]headrace config CONFIG[/] prints every
    key with its value; each can be overridden here.
    """
    with _errors_reported():
        loaded = _begin(config, overrides)
        from cluster.train import train as run

        status = run(loaded)
    raise typer.Exit(status)


@app.command()
def sft(config: ConfigPath, overrides: Overrides = None) -> None:
    """Train a model on conversations (the [bold]model.warm_start[/] section) and write its checkpoint folder."""
    with _errors_reported():
        loaded = _begin(config, overrides)
        from cluster.sft import sft as run

        status = run(loaded)
    raise typer.Exit(status)


@app.command(name="eval")
def evaluate(config: ConfigPath, overrides: Overrides = None) -> None:
    """Evaluate a model on the evaluation tasks; [bold]model.path=FOLDER[/] says which.

    FOLDER is a Hugging Face checkpoint folder, such as the [bold]runs/NAME/model[/] of a run.
    """
    with _errors_reported():
        loaded = _begin(config, overrides)
        from cluster.evaluation import evaluate as run

        status = run(loaded)
    raise typer.Exit(status)


@app.command(name="config")
def show_config(
    config: ConfigPath,
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of YAML.")] = False,
) -> None:
    """Check a configuration and print it with every default filled in; passwords are not shown.

    What it names (environment, files, models) is looked at by the commands that use it.
    """
    with _errors_reported():
        data = _load(config, overrides).redacted()
    if as_json:
        typer.echo(json.dumps(data, indent=2, ensure_ascii=False))
    else:
        from cluster.loading import to_yaml

        typer.echo(to_yaml(data), nl=False)


@app.command()
def plan(
    config: ConfigPath,
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    search: Annotated[
        bool, typer.Option(help="Look for the most tokens per chip that fit: up to two compilations more.")
    ] = True,
) -> None:
    """Compile the training step for a TPU slice, without one: does it fit, and how fast can it be at best?

    [bold]plan.topology=v5p:4x4x4[/] says for which. It needs the extra [bold]tpu[/]; nothing is run on a TPU.
    """
    with _errors_reported():
        loaded = _load(config, overrides)
        from cluster.planning import plan as run

        status = run(loaded, as_json=as_json, search=search)
    raise typer.Exit(status)


@app.command()
def scale(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="Folder of a run that trains, such as runs/NAME.", show_default=False)
    ],
    samplers: Annotated[int, typer.Option(help="Samplers that it shall have.", show_default=False)],
) -> None:
    """Change the number of samplers of a run while it trains; its display says when they serve.

    New ones get the current weights first; those that leave finish what they were asked. A later start of the run has
    [bold]sampler.replicas[/] again.
    """
    with _errors_reported():
        from cluster.runfolder import request_scale

        request_scale(run, samplers)
    typer.echo(f"headrace: {run} is asked for {samplers} samplers")


buffer_app = typer.Typer(
    name="buffer",
    help="Look into the buffer of a run, and empty it.",
    no_args_is_help=True,
)
app.add_typer(buffer_app)

Target = Annotated[
    str,
    typer.Argument(
        metavar="URL",
        help="redis://user:password@host:port/db of the Redis, or the folder of a run whose own Redis is up.",
        show_default=False,
    ),
]
RunName = Annotated[str | None, typer.Option("--run", help="Run in that Redis; needed if it has several.")]
PayloadUrls = Annotated[
    list[str] | None, typer.Option("--payload-url", help="One of buffer.payload_urls; repeat it for each, in order.")
]


@buffer_app.command(name="stats")
def buffer_stats(
    url: Target,
    run: RunName = None,
    payload_url: PayloadUrls = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Print what is inside: groups, versions, ages, bytes, who holds leases and slots, and what became of groups."""
    with _errors_reported():
        from rich.console import Console

        from cluster import store

        store.print_stats(store.find(url, run, payload_url or ()), as_json=as_json, console=Console(highlight=False))


@buffer_app.command(name="peek")
def buffer_peek(
    url: Target,
    run: RunName = None,
    payload_url: PayloadUrls = None,
    group: Annotated[str | None, typer.Option(help="Group to print; by default the one that is leased next.")] = None,
    index: Annotated[int | None, typer.Option(help="Which of its trajectories; by default the first.")] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Model folder with the tokenizer; known for a run folder, else ids are printed.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Print one trajectory as text, what the policy was given and what it sampled apart. Nothing is leased."""
    with _errors_reported():
        from rich.console import Console

        from cluster import store

        store.print_trajectory(
            found := store.find(url, run, payload_url or ()),
            group=group,
            index=index,
            tokenizer=tokenizer or found.tokenizer,
            as_json=as_json,
            console=Console(highlight=False),
        )


@buffer_app.command(name="drain")
def buffer_drain(
    url: Target,
    run: RunName = None,
    payload_url: PayloadUrls = None,
    delete: Annotated[
        bool, typer.Option("--delete", help="Then delete everything of the run: it cannot go on in this Redis.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Empty a buffer of running and ready groups; their tasks are issued again.

    What a learner holds stays, and workers that are up get new slots at once: stop them first to keep it empty.
    """
    with _errors_reported():
        from cluster import store
        from cluster.errors import RunError

        found = store.find(url, run, payload_url or ())
        stats = found.buffer.stats()
        question = f"drain {stats.reserved + stats.ready} groups of run {found.run}"
        question += " and delete everything of the run, version and task cursor included" if delete else ""
        if not yes:
            if not sys.stdin.isatty():
                raise RunError(f"--yes is missing: this would {question}; add it where nobody can be asked")
            typer.confirm(f"{question}?", abort=True)
        typer.echo(f"{found.buffer.drain()} groups drained; their tasks are issued again")
        if delete:
            typer.echo(f"{found.buffer.delete()} keys deleted")


@buffer_app.command(name="acl")
def buffer_acl(
    run: Annotated[str, typer.Argument(help="Run whose keys the user may touch; * for all runs.")] = "*",
) -> None:
    """Print the Redis command that makes a user who may do what the buffer needs, and nothing else.

    Put a password in place of PASSWORD, and both into buffer.url.
    """
    with _errors_reported():
        from cluster import store

        store.print_rules(run)


def main() -> None:
    """Entry point of the console script and of ``python -m cluster``."""
    app()


@contextmanager
def _errors_reported() -> Iterator[None]:
    """Turn what a person can mend into one line per problem; anything else keeps its traceback, which is what helps."""
    try:
        yield
    except KeyboardInterrupt:
        _report("stopped")
        raise typer.Exit(128 + signal.SIGINT) from None
    except Exception as error:
        from cluster.errors import ConfigError, RunEnded, ServiceDied, is_mendable, root_cause

        if isinstance(error, ServiceDied | RunEnded):
            _report(f"error: {error}")
            raise typer.Exit(EXIT_FAILED) from None
        cause = root_cause(error)
        if not is_mendable(cause):
            raise
        problems = str(cause).splitlines() if isinstance(cause, ConfigError) else [str(cause)]
        for problem in problems:
            _report(f"error: {' '.join(problem.split())}")
        raise typer.Exit(EXIT_INPUT) from None


def _report(text: str) -> None:
    typer.echo(f"headrace: {text}", err=True)


def _begin(path: Path, overrides: list[str] | None) -> Config:
    """Load the configuration of a command that works for long, saying so at once: the imports take seconds."""
    typer.echo(f"headrace: loading {path} ...")
    return _load(path, overrides)


def _load(path: Path, overrides: list[str] | None) -> Config:
    from cluster.loading import load_config
    from cluster.ray_runtime import set_ray_environment

    config = load_config(path, overrides or [])
    set_ray_environment()  # the commands import Ray
    return config
