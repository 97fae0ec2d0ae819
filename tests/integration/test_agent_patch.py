"""The patch of a session is what its agent changed, whatever it did to git, and is kept however grading ends."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from gangline.domain.errors import RuntimeUnavailable
from gangline.domain.session import SessionResult
from gangline.node.sessions.attempt import Attempt
from gangline.node.sessions.evaluation import MAX_ARTIFACT_BYTES, bounded
from gangline.sandbox.bubblewrap.runtime import BubblewrapRuntime
from gangline.settings import plugins
from support.node.attempt import lease_of, node_parts
from support.node.folder_runtime import FolderRuntime
from support.requirements import need_command
from support.service.field_tasks import git
from support.training.evaluation_samples import a_context

WHO = "-c user.name=kennel -c user.email=kennel@example.com"
PREPARE = f"""
mkdir repo && cd repo && git init -q -b main && seq 30 > old.txt && echo a > a.txt && echo b > b.txt
echo g > gone.txt && printf '\\0\\1' > data.bin && echo 'ignored*' > .gitignore && echo i > ignored-but-known.txt
git add -Af . && git {WHO} commit -q -m Begin
"""
EDITS = """
cd repo && echo more >> a.txt && echo more >> b.txt && echo more >> ignored-but-known.txt && rm gone.txt
mv old.txt 'new name.txt' && printf '\\0\\2' > data.bin && printf '\\377\\0' > new.bin && mkdir 'a dir'
echo x > 'a dir/\u00fc.sh' && chmod +x 'a dir/\u00fc.sh' && ln -s a.txt link && echo no > ignored.txt
"""
HOSTILE = """
cat > ~/evil <<END
#!/bin/sh
echo "\\$0 \\$*" >> {ran}
kill -9 \\$PPID
END
chmod +x ~/evil; mkdir ~/hooks
for hook in post-index-change pre-commit reference-transaction; do cp ~/evil ~/hooks/$hook; done
echo '*' > ~/ignore
git update-index --assume-unchanged a.txt; git update-index --skip-worktree b.txt
for file in .git/config ~/.gitconfig; do
  git config -f $file diff.external ~/evil; git config -f $file core.fsmonitor ~/evil
  git config -f $file core.hooksPath ~/hooks; git config -f $file filter.x.clean ~/evil
  git config -f $file diff.x.textconv ~/evil; git config -f $file alias.read-tree "!$HOME/evil"
  git config -f $file core.excludesFile ~/ignore
done
mkdir -p .git/info; echo '*' > .git/info/exclude; echo '* filter=x diff=x' > .git/info/attributes
ln -s /nowhere ~/.gangline-patch
git status; git diff HEAD
ls {ran} && mv {ran} {ran}.before
"""
ROW: dict[str, Any] = {"repo_dir": "repo", "fail_to_pass": ["t"], "test_command": "grep -q more a.txt && echo PASSED t"}


@pytest.fixture(params=["process", "sandbox"])
async def backend(request: pytest.FixtureRequest) -> str:
    need_command("git", "apt-get install git")
    if request.param == "sandbox":
        try:
            await BubblewrapRuntime().check()
        except RuntimeUnavailable as error:
            pytest.skip(error.message)
    return request.param


async def ended(folder: Path, backend: str, command: str, *, prepare: str = PREPARE, **config: Any) -> SessionResult:
    """The result of a session whose agent is a shell command, graded by `swe_bench`."""
    lease = lease_of(
        runtime={"backend": backend, "prepare": [{"type": "exec", "command": prepare}]},
        agent={"harness": "shell", "settings": {"command": command}, "allow_no_model_call": True},
        evaluator={"strategy": "swe_bench", "refresh_runtime": True, "config": {**ROW, **config}},
    )
    async with node_parts(folder / "node") as parts:
        return await Attempt(lease, parts).live()


def untampered(folder: Path) -> bytes:
    """What git says of the same edits to a repository that nobody else touched."""
    folder.mkdir()
    script = f"{PREPARE} cd .. && ({EDITS}) && cd repo && git add -A && git diff --cached --binary HEAD"
    done = subprocess.run(["sh", "-c", script], cwd=folder, capture_output=True, check=True)
    assert done.stdout.count(b"diff --git") == 9
    return done.stdout


@pytest.mark.parametrize("then", ["true", "rm -rf .git", "git add -A", "rm .git/index; touch .git/index.lock"])
async def test_the_patch_is_what_git_says_of_an_untampered_clone(tmp_path: Path, backend: str, then: str) -> None:
    result = await ended(tmp_path, backend, f"{EDITS} {then}")
    assert result.artifacts["patch.diff"] == untampered(tmp_path / "clone")
    assert (result.failure, result.reward) == (None, 1.0)
    assert result.reward_details["patch_bytes"] == len(result.artifacts["patch.diff"])


async def test_settings_of_the_agent_neither_run_nor_hide_anything(tmp_path: Path, backend: str) -> None:
    """They do both to a git that reads them."""
    ran = tmp_path / "ran"
    result = await ended(tmp_path, backend, f"{EDITS} {HOSTILE.format(ran=ran if backend == 'process' else '~/ran')}")
    assert b"ran" in result.artifacts["harness.stdout"], "its programs ran for the agent's own git"
    assert result.artifacts["patch.diff"] == untampered(tmp_path / "clone")
    assert (result.failure, result.reward) == (None, 1.0)
    assert not ran.exists()


@pytest.mark.parametrize(
    ("command", "patch"),
    [("true", b""), ("cd repo && echo more >> a.txt && mkdir in && git init -q in && echo x > in/file", None)],
)
async def test_every_session_has_a_patch(tmp_path: Path, backend: str, command: str, patch: bytes | None) -> None:
    """Also one that changed nothing, and one that left a repository without a commit in the repository."""
    result = await ended(tmp_path, backend, command)
    kept = result.artifacts["patch.diff"]
    assert kept == patch if patch is not None else kept.startswith(b"diff --git a/a.txt b/a.txt\n")
    assert result.reward == (0.0 if patch is not None else 1.0)
    assert ("left_out" in result.reward_details) == (patch is None)


async def test_the_patch_is_kept_when_the_grader_is_broken(tmp_path: Path, backend: str) -> None:
    wrong = "--- a/none.py\n+++ b/none.py\n@@ -1 +1 @@\n-x\n+y\n"
    result = await ended(tmp_path, backend, EDITS, test_patch=wrong)
    assert result.artifacts["patch.diff"] == untampered(tmp_path / "clone")
    assert result.failure is not None
    assert (result.outcome, result.failure.code) == ("infra_error", "evaluator_error")


@pytest.mark.parametrize("settings", [{}, {"patch_command": "cat repo/patch"}])
async def test_an_agent_whose_changes_cannot_be_read_has_failed(
    tmp_path: Path, backend: str, settings: dict[str, str]
) -> None:
    result = await ended(tmp_path, backend, "rm -rf repo; ln -s / ~/.gangline-patch; touch repo", **settings)
    if settings:
        assert (result.outcome, result.reward) == ("completed", 0.0), "a command that fails is the agent's doing"
        return
    assert result.failure is not None
    assert (result.outcome, result.failure.code) == ("agent_error", "grading_spoiled")
    assert "cannot be read" in result.failure.message


async def test_a_patch_that_is_too_long_is_kept_cut_and_not_graded(tmp_path: Path, backend: str) -> None:
    result = await ended(tmp_path, backend, EDITS, max_patch_bytes=200)
    assert result.artifacts["patch.diff"] == untampered(tmp_path / "clone")[:200]
    assert (result.reward, result.reward_details["patch_truncated"]) == (0.0, True)


async def test_only_the_tasks_folder_of_a_larger_repository_counts(tmp_path: Path, backend: str) -> None:
    prepare = PREPARE.replace("git add", "mkdir sub && echo s > sub/s.txt && git add")
    changes = {"repo_dir": "repo/sub", "test_command": "grep -q more s.txt && echo PASSED t"}
    command = "cd repo && echo more >> a.txt && echo more >> sub/s.txt && git init -q sub && rm -rf .git sub/.git"
    result = await ended(tmp_path, backend, command, prepare=prepare, **changes)
    assert (result.failure, result.reward) == (None, 1.0)
    assert result.artifacts["patch.diff"].count(b"diff --git") == 1
    assert result.artifacts["patch.diff"].startswith(b"diff --git a/sub/s.txt b/sub/s.txt\n")


async def test_submodules_stay_as_they_are(tmp_path: Path, backend: str) -> None:
    """Git looks into a submodule by running itself there, with the submodule's settings."""
    other = f"git init -q in && echo x > in/file && git -C in add . && git -C in {WHO} commit -q -m Begin"
    prepare = PREPARE.replace("git add", f"{other} && git add")
    command = "cd repo && echo more >> a.txt && echo more >> in/file && rm -rf in/.git"
    result = await ended(tmp_path, backend, command, prepare=prepare)
    assert (result.failure, result.reward) == (None, 1.0)
    assert result.artifacts["patch.diff"].startswith(b"diff --git a/a.txt b/a.txt\n")
    assert result.artifacts["patch.diff"].count(b"diff --git") == 1


async def test_the_graders_own_folder_is_no_part_of_a_repository_around_it(tmp_path: Path) -> None:
    need_command("git", "apt-get install git")
    agents, clean = FolderRuntime(tmp_path / "agents"), FolderRuntime(tmp_path / "clean")
    for folder in (tmp_path / "agents", tmp_path / "clean"):
        (folder / "a.txt").write_text("a\n")
        git(folder, "init", "-q")
        git(folder, "add", ".")
        git(folder, "commit", "-q", "-m", "Begin")
    (tmp_path / "agents" / "a.txt").write_text("a\nmore\n")
    context = a_context(agents, fresh=clean)
    found = await plugins.make_evaluator("swe_bench", {**ROW, "repo_dir": ".."}).evaluate(context)
    assert found.reward == 1.0
    assert context.artifacts["patch.diff"] == git(tmp_path / "agents", "diff", "--binary").encode()


def test_what_an_evaluator_leaves_is_bounded_and_says_so() -> None:
    kept = bounded({"a": b"x" * (MAX_ARTIFACT_BYTES + 1), "b": b"y", "c": b""})
    assert len(kept["a"]) == MAX_ARTIFACT_BYTES
    assert kept["a.cut"] == b"The first %d of %d bytes are kept.\n" % (MAX_ARTIFACT_BYTES, MAX_ARTIFACT_BYTES + 1)
    assert (kept["b"], kept["c"], "b.cut" in kept, "c.cut" in kept) == (b"", b"", True, False)
