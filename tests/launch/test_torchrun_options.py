"""Options of torchrun for the processes of a script."""

from __future__ import annotations

import json
import os
import sys
import textwrap
from pathlib import Path

import pytest

from drawbar.launch import ScriptTrainer, TorchrunOptions
from drawbar.train import Result
from tests.launch.conftest import Launch


def test_launch_with_tee_and_redirects_prints_prefixed_lines_and_writes_files(
    launch: Launch,
) -> None:
    done = launch(
        """
        import os, sys
        print("one\\ntwo", end="")
        print("problem", os.environ["LOCAL_RANK"], file=sys.stderr)
        """,
        *("--tee", "1", "-r1:2", "--rdzv-id=job", "--log-dir", "logs", "--role", "trainer"),
        *("--log-line-prefix-template", "<${role_name} ${rank}/${local_rank}> "),
    )
    assert done.code == 0, done.err
    assert sorted(done.out.decode().splitlines()) == [
        "<trainer 0/0> one",
        "<trainer 0/0> two",
        "<trainer 1/1> one",
        "<trainer 1/1> two",
    ]
    assert done.err == "problem 0\n"
    (logs,) = (launch.directory / "logs").glob("job_*/attempt_0")
    files = {str(path.relative_to(logs)): path.read_text() for path in logs.rglob("*.log")}
    assert files == {
        "0/stdout.log": "one\ntwo",
        "1/stdout.log": "one\ntwo",
        "1/stderr.log": "problem 1\n",
    }
    assert sorted(done.log(1)) == sorted("one\ntwoproblem 1\n")


def test_launch_with_local_ranks_filter_prints_these_ranks(launch: Launch) -> None:
    source = "import os; print('rank', os.environ['RANK'], end='')"
    assert launch(source, "--local_ranks_filter", "1").out == b"rank 1"


def test_torchrun_options_select_destinations_of_output() -> None:
    def select(rank: int, **options: object) -> dict[str, str]:
        environment = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        return dict(TorchrunOptions(**options).make_output(environment, "").console)  # type: ignore[arg-type]

    assert [select(0), select(1)] == [{"stdout": "", "stderr": ""}, {}]
    assert select(0, redirects="3") == {}
    assert select(1, redirects="3", tee="1:2") == {"stderr": "[default1]:"}
    assert select(1, tee="3", local_ranks_filter=(0,)) == {}
    assert select(0, redirects="0:1", local_ranks_filter=(0, 1)) == {"stderr": ""}


def make_executable(path: Path, source: str) -> Path:
    path.write_text(textwrap.dedent(source))
    path.chmod(0o755)
    return path


def test_launch_without_python_runs_a_program_that_may_report(any_launch: Launch) -> None:
    (any_launch.directory / "report.py").write_text(
        "from drawbar import train\n"
        "train.report({'rank': train.get_context().get_world_rank(), 'world': 2})\n"
    )
    program = make_executable(
        any_launch.directory / "program.sh",
        f"""\
        #!/bin/sh
        if [ "$RANK" = 0 ]; then
            echo "$1 $TORCHELASTIC_RUN_ID $ROLE_NAME $TORCH_NCCL_ASYNC_ERROR_HANDLING"
            test -d "$(dirname "$TORCHELASTIC_ERROR_FILE")" && test -n "$OMP_NUM_THREADS" || exit 1
        fi
        exec {sys.executable} report.py
        """,
    )
    done = any_launch(
        "",
        *("--no-python", "--name=program"),
        script=(str(program), "argument"),
        PET_RDZV_ID="job",
        PET_TEE="0:1",
        TORCH_NCCL_ASYNC_ERROR_HANDLING="3",
    )
    assert done.code == 0, done.err
    assert done.out.decode() == "[default0]:argument job default 3\n"
    result = Result.from_path(any_launch.directory / "program")
    assert result.metrics is not None
    assert (result.metrics["rank"], result.metrics["world"]) == (0, 2)


def test_launch_of_program_with_error_file_reports_its_exception(launch: Launch) -> None:
    # As `torch.distributed.elastic.multiprocessing.errors.record` writes it.
    details = {"py_callstack": "Traceback: in step", "timestamp": "1"}
    error = {"message": {"message": "ValueError: loss: nan", "extraInfo": details}}
    program = make_executable(
        launch.directory / "program.sh",
        f"""\
        #!/bin/sh
        if [ "$RANK" = 0 ]; then sleep 600; fi
        echo '{json.dumps(error)}' > "$TORCHELASTIC_ERROR_FILE"
        exit 7
        """,
    )
    done = launch(
        "", "--no-python", script=(str(program),), TORCHELASTIC_ERROR_FILE="launcher.json"
    )
    assert done.code == 7
    assert "rank 1: ValueError: loss: nan" in done.err
    assert "Traceback: in step" in done.err
    written = json.loads((launch.directory / "launcher.json").read_text())["message"]
    assert written["message"] == "ValueError: loss: nan"
    assert written["extraInfo"]["py_callstack"] == "Traceback: in step"
    assert written["errorCode"] == 7


@pytest.mark.nightly
def test_launch_of_program_that_exits_prints_its_code_like_a_script(launch: Launch) -> None:
    command = 'if [ "$RANK" = 0 ]; then sleep 600; fi; exit 3'
    done = launch("", "--no-python", script=("sh", "-c", command))
    assert done.code == 3
    log = launch.directory / "run/logs/rank_1.log"
    message = f"drawbar: error: Rank 1 exited with code 3. Its output is in {log}.\n"
    assert done.err == message


def test_launch_with_virtual_local_rank_shows_every_rank_its_gpu(launch: Launch) -> None:
    source = "import os; print(os.environ['LOCAL_RANK'], os.environ['CUDA_VISIBLE_DEVICES'])"
    options = ("--virtual-local-rank", "--use-gpu", "--tee=3")
    done = launch(source, *options, CUDA_VISIBLE_DEVICES="5,7")
    assert done.code == 0, done.err
    assert sorted(done.out.decode().splitlines()) == ["[default0]:0 5", "[default1]:0 7"]


def test_script_trainer_of_program_that_cannot_be_executed_raises(tmp_path: Path) -> None:
    script = tmp_path / "script.sh"
    with pytest.raises(FileNotFoundError, match=f"No program {script} in {os.getcwd()} or PATH"):
        ScriptTrainer(script, is_executable=True)
    script.touch()
    with pytest.raises(PermissionError, match=r"is not executable\. Run 'chmod"):
        ScriptTrainer(script, is_executable=True)
    with pytest.raises(ValueError, match="is_executable=True does not support is_module=True"):
        ScriptTrainer("json.tool", is_executable=True, is_module=True)
