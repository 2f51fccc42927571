"""The scripts for Slurm, run by bash with stand-ins of its commands. tests/cluster runs them on a real Slurm."""

import contextlib
import os
import re
import signal
import subprocess
import time
from dataclasses import replace

import pytest

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.ops.clusters.launcher import ClusterRun, Launched, find_launcher, launch
from cosmos_rl_core.ops.clusters.slurm import Slurm, _step, rollout_script, run_script

RECIPE = """
[run]
domain = "cosmos_rl_core.testing.tiny:TINY"
name = "my run"
output_dir = "{directory}/run"
max_steps = 3
[[reward.functions]]
name = "hits"
[cluster]
command = "{directory}/cosmos-rl"
env = {{ WORD = "two words" }}
setup = ["echo module >> {directory}/calls"]
"""
SRUN = """#!/bin/bash
while [ "${1#-}" != "$1" ]; do shift; done  # its options
"$@" & child=$!
trap 'kill -TERM $child' TERM
wait $child; code=$?
while kill -0 $child 2>/dev/null; do wait $child; code=$?; done
exit $code
"""
"""srun sends its signals on to the step."""


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """A folder with commands of Slurm: `squeue` prints the file `queue`, all are recorded in `calls`."""
    commands = {
        "srun": SRUN,
        "sbatch": f'#!/bin/bash\necho sbatch "$@" >> {tmp_path}/calls; echo 7',
        "squeue": f"#!/bin/bash\ncat {tmp_path}/queue",
        "scancel": f'#!/bin/bash\necho scancel "$@" >> {tmp_path}/calls',
    }
    (tmp_path / "bin").mkdir()
    (tmp_path / "queue").write_text("")
    for name, text in commands.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    return tmp_path


@pytest.fixture
def cluster(slurm):
    """The recipe as a ClusterRun; `program` is the text of cosmos-rl, a shell script that gets the command as $1."""

    def make(*overrides, program="exit 0"):
        (slurm / "run.toml").write_text(RECIPE.format(directory=slurm))
        (slurm / "cosmos-rl").write_text(f'#!/bin/bash\necho "$@" >> {slurm}/calls\n{program}\n')
        (slurm / "cosmos-rl").chmod(0o755)
        run = ClusterRun.of(slurm / "run.toml", overrides)
        Launched(platform="slurm", file=str(run.file), overrides=overrides, folders=run.folders).write(run)
        (slurm / "run" / "launch" / "rollouts").write_text("")
        (slurm / "calls").touch()
        return run

    return make


@pytest.fixture
def run_in_bash(slurm):
    """Runs a script as a job of its own; what is left of it is killed at the end."""
    jobs = []

    def run(script, **options):
        (slurm / "job.sh").write_text(script)
        environment = {**os.environ, "SLURM_JOB_ID": "7"}
        command = ["bash", slurm / "job.sh"]
        jobs.append(subprocess.Popen(command, text=True, env=environment, start_new_session=True, **options))
        return jobs[-1]

    yield run
    for job in jobs:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
        job.wait()


def calls(slurm, word=""):
    return [line for line in (slurm / "calls").read_text().splitlines() if line.startswith(word)]


def wait_until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_plan_shows_every_option_of_the_recipe(cluster):
    run = cluster(
        'cluster.slurm={partition="a", rollout_partition="b", account="me", time="04:00:00", cpus_per_task=8, '
        'container_image="/image.sqsh", container_mounts="/data:/data", extra=["--reservation=night"]}',
        "policy.replicas=2",
        "policy.ranks_per_node=4",
        "rollout.replicas=3",
    )
    text = Slurm().plan(run)
    controller, rollout = text.split("# ==== ")[1:]
    assert f"{run.label}.rollout-0 to {run.label}.rollout-2" in rollout.splitlines()[0]
    for line in ("--nodes=2", "--partition=a", "--account=me", "--time=04:00:00", "--gpus-per-node=4"):
        assert f"#SBATCH {line}\n" in controller
    assert "--no-kill\n" in controller and "--no-kill\n" not in rollout
    assert "#SBATCH --partition=b\n" in rollout and "#SBATCH --gpus-per-node=1\n" in rollout
    assert "#SBATCH --reservation=night\n" in rollout
    assert "--cpus-per-task=8)" in controller
    assert "export WORD='two words'" in controller
    assert "--relative=1 --gpus-per-node=4" in controller and "--name policy-1" in controller


def test_a_policy_over_machines_meets_on_its_first_one(cluster):
    text = run_script(cluster("policy.replicas=2", "policy.ranks_per_node=4", "policy.num_nodes=2"))
    second = next(line for line in text.splitlines() if "--name policy-1" in line)
    assert "--nodes=2 --ntasks=2 --relative=2" in second
    assert second.endswith("""--node $SLURM_PROCID --rendezvous $0' "${machines[2]}:$((port + 2))" &""")


def test_machines_of_a_policy_meet_at_a_port_of_their_job(cluster, slurm, monkeypatch, run_in_bash):
    monkeypatch.setenv("SLURM_PROCID", "1")
    (slurm / "bin" / "scontrol").write_text("#!/bin/bash\nprintf 'a1\\na2\\n'\n")
    (slurm / "bin" / "scontrol").chmod(0o755)
    script = run_script(cluster("policy.ranks_per_node=4", "policy.num_nodes=2"))
    assert run_in_bash(script).wait(60) == 0
    (worker,) = calls(slurm, "worker")
    assert worker.endswith("--node 1 --rendezvous a1:20224")  # job 7
    assert run_in_bash(script.replace("SLURM_JOB_ID * 32", "8 * 32")).wait(60) == 0
    assert calls(slurm, "worker")[1].endswith("--rendezvous a1:20256")


def test_a_job_goes_on_without_a_machine_where_its_run_does(cluster):
    gang = "cluster.slurm.gang=true"
    two = ("policy.num_nodes=2", "policy.ranks_per_node=1")
    assert "#SBATCH --no-kill\n" not in run_script(cluster(*two))
    assert "#SBATCH --no-kill\n" not in run_script(cluster(*two, gang))
    assert "#SBATCH --no-kill\n" in run_script(cluster(*two, "policy.replicas=2"))
    assert "#SBATCH --no-kill\n" in run_script(cluster(gang))


CONTAINER = """#!/bin/bash
while [ "${{1#-}}" != "$1" ]; do
  case $1 in --container-image=/image.sqsh) ;; --container-*=*) declare -x ${{1:12:5}}="${{1#*=}}" ;; esac
  shift
done
exec unshare --mount bash -c '
  mount -t tmpfs none /mnt && mkdir /mnt/image /mnt/inside && mount --bind {hidden}/image /mnt/image || exit 7
  IFS=, read -ra mounts <<< "$mount"
  for one in "${{mounts[@]}}"; do
    case $one in {hidden}/*:{hidden}/*) ;; *) continue ;; esac
    place=/mnt/inside/${{one#*:{hidden}/}}
    mkdir -p $place && mount --bind ${{one%%:*}} $place || exit 7
  done
  mount --rbind /mnt/inside {hidden} && cd $workd && PATH=/mnt/image exec "$@"
' container "$@"
"""
"""srun with pyxis: the step has the programs of the image alone, and of the hidden folder what is mounted."""
IMAGE = """#!/bin/bash
echo "$*" >> calls
[ -e {hidden}/recipes/run.toml ] && [ -d {hidden}/runs/run/launch ] && [ -d {hidden}/saved ] || exit 9
[ ! -e {hidden}/bin ] || exit 9
[ $1 = worker ] || until [[ $(<calls) = *worker* ]]; do :; done  # the image has no sleep
"""


def test_a_container_has_its_own_program_and_the_folders_of_the_run(slurm, monkeypatch, run_in_bash):
    probe = subprocess.run(["unshare", "--mount", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True)
    if probe.returncode:
        pytest.skip("folders cannot be mounted here, which takes root")
    for name in ("recipes", "work", "image"):
        (slurm / name).mkdir()
    (slurm / "image" / "bash").symlink_to("/bin/bash")
    scripts = {"image/cosmos-rl": IMAGE, "bin/srun": CONTAINER, "bin/scontrol": "#!/bin/bash\necho a1\n"}
    for name, text in scripts.items():
        (slurm / name).write_text(text.format(hidden=slurm) if "{hidden}" in text else text)
        (slurm / name).chmod(0o755)
    (slurm / "recipes" / "run.toml").write_text(RECIPE.format(directory=slurm))
    monkeypatch.chdir(slurm / "work")
    overrides = [
        'cluster.command=""',
        f'run.output_dir="{slurm}/runs/run"',
        f'checkpoint.path="{slurm}/saved"',
        "policy.num_nodes=2",
        "policy.ranks_per_node=1",
        'cluster.slurm={container_image="/image.sqsh", container_mounts="/usr:/data"}',
    ]
    run = ClusterRun.of(slurm / "recipes" / "run.toml", overrides)
    (run.directory / "launch").mkdir(parents=True)
    Slurm().start(run)
    (run.directory / "launch" / "rollouts").write_text("")
    for name in ("run", "rollout"):
        script = (run.directory / "launch" / f"{name}.sbatch").read_text()
        assert f"#SBATCH --chdir={slurm}/work\n" in script
        assert "--container-mounts=/usr:/data," in script
        assert run_in_bash(script).wait(60) == 0
    assert sorted(line.split()[0] for line in calls(slurm / "work")) == ["controller", "worker", "worker"]


def test_a_later_job_of_the_run_submits_the_rollouts_that_have_ended(cluster, slurm, run_in_bash):
    run = cluster()
    (run.directory / "launch" / "rollouts").write_text("rollout-0\nrollout-4\n")
    assert run_in_bash(run_script(run)).wait(60) == 0
    script = run.directory / "launch" / "rollout.sbatch"
    assert calls(slurm, "sbatch") == [
        f"sbatch --job-name={run.label}.{name} {script}" for name in ("rollout-0", "rollout-4")
    ]


def test_the_job_ends_with_the_controller(cluster, slurm, run_in_bash):
    job = run_in_bash(run_script(cluster()))
    assert job.wait(60) == 0
    assert sorted(call.split()[0] for call in calls(slurm)) == ["controller", "module", "worker"]


@pytest.mark.parametrize(("code", "starts"), [(1, 1), (2, 1), (137, 4)])
def test_a_controller_is_started_again_after_a_crash_alone(cluster, slurm, code, starts, run_in_bash):
    program = f'[ "$1" = worker ] || exit {code}'
    job = run_in_bash(run_script(cluster(program=program)).replace("sleep 1", "true"))
    assert job.wait(60) == code
    commands = calls(slurm, "controller")
    assert len(commands) == starts  # restart_workers = 3
    assert [command.endswith("--resume auto") for command in commands] == [True] + [False] * (starts - 1)


@pytest.mark.parametrize("restarts", ["0", "1"])
def test_a_job_that_was_queued_again_starts_crashed_workers_again(cluster, slurm, monkeypatch, restarts, run_in_bash):
    controller = f"until [ $(grep -c ^worker.*policy-0 {slurm}/calls) -ge 4 ]; do sleep 0.05; done"
    program = f'case "$*" in *policy-1*) ;; *policy-0*) exit 1;; *) {controller};; esac'
    run = cluster("policy.replicas=2", program=program)
    (run.directory / "controller.json").write_text("{}")
    (run.directory / "launch" / "7.pid.ended").touch()
    monkeypatch.setenv("SLURM_RESTART_COUNT", restarts)
    job = run_in_bash(run_script(run).replace("sleep 1", "true").replace("sleep 600", "true"))
    assert job.wait(60) == 0
    assert len([line for line in calls(slurm, "worker") if "policy-0" in line]) == 4
    assert (run.directory / "controller.json").exists() == (restarts == "0")


@pytest.mark.parametrize(("code", "only"), [(0, "--state=PENDING "), (2, "")])
def test_the_end_of_the_run_cancels_rollouts(cluster, slurm, code, only, run_in_bash):
    run = cluster(program=f'[ "$1" = worker ] || exit {code}')
    (run.directory / "launch" / "rollouts").write_text("rollout-0\n")
    assert run_in_bash(run_script(run)).wait(60) == code
    assert calls(slurm, "scancel") == [f"scancel {only}--name={run.label}.rollout-0"]


def test_a_rollout_is_started_again_after_a_crash_and_not_after_an_error_of_the_user(cluster, slurm, run_in_bash):
    for code, starts in ((1, 4), (2, 1), (0, 1)):
        run = cluster(program=f"exit {code}")
        (slurm / "calls").write_text("")
        job = run_in_bash(rollout_script(run, run.rollouts()[0]).replace("sleep 1", "true"))
        assert job.wait(60) == code
        assert len(calls(slurm, "worker")) == starts


def test_before_the_time_limit_the_controller_ends_and_the_job_is_submitted_again(cluster, slurm, run_in_bash):
    program = 'trap "exit 130" TERM; echo ready >> $0.ready; while [ "$1" = controller ]; do sleep 0.05; done'
    run = cluster(program=program)
    job = run_in_bash(run_script(run))
    wait_until((slurm / "cosmos-rl.ready").exists)
    wait_until(lambda: calls(slurm, "controller"))
    job.send_signal(10)  # USR1
    assert job.wait(60) == 0
    again = f"sbatch --parsable --dependency=afterany:7 --job-name= {run.directory}/launch/run.sbatch"
    assert calls(slurm, "sbatch") == [again]
    assert calls(slurm, "scancel") == []


@pytest.mark.parametrize("code", [0, 130])
def test_the_next_job_waits_while_the_run_saves_and_is_cancelled_if_the_run_has_ended(
    cluster, slurm, code, run_in_bash
):
    saving = f"touch {slurm}/saving; until [ -e {slurm}/saved ]; do sleep 0.05; done; exit {code}"
    run = cluster(
        program=f'[ "$1" = worker ] && exit 0; trap "{saving}" TERM; touch {slurm}/up; while :; do sleep .05; done'
    )
    job = run_in_bash(run_script(run))
    wait_until((slurm / "up").exists)
    job.send_signal(10)
    wait_until((slurm / "saving").exists)
    assert len(calls(slurm, "sbatch")) == 1
    (slurm / "saved").touch()
    assert job.wait(60) == 0
    assert calls(slurm, "scancel") == (["scancel 7"] if code == 0 else [])


def test_a_rollout_that_left_at_its_time_limit_returns(cluster, slurm, run_in_bash):
    run = cluster(program='trap "exit 0" TERM; echo ready >> $0.ready; while true; do sleep 0.05; done')
    job = run_in_bash(rollout_script(run, run.rollouts()[0]))
    wait_until((slurm / "cosmos-rl.ready").exists)
    job.send_signal(10)
    assert job.wait(60) == 0
    assert len(calls(slurm, "sbatch")) == 1 and calls(slurm, "scancel") == []


@pytest.mark.parametrize("others", [0, 1])
def test_the_run_ends_when_all_policies_are_given_up(cluster, slurm, others, run_in_bash):
    """With one more policy it goes on, until the controller ends."""
    controller = f"trap 'exit 130' TERM; touch {slurm}/up; while [ ! -e {slurm}/end ]; do sleep 0.05; done"
    policy = f"until [ -e {slurm}/up ]; do sleep .05; done; exit 5"
    program = f'case "$*" in *policy-1*) ;; *policy-0*) {policy};; *) {controller};; esac'
    run = cluster(f"policy.replicas={1 + others}", program=program)
    job = run_in_bash(run_script(run).replace("sleep 1", "true"))
    if others:
        wait_until(lambda: len([line for line in calls(slurm, "worker") if "policy-0" in line]) == 4)
        assert job.poll() is None
        (slurm / "end").touch()
    assert job.wait(60) == (0 if others else 5)


def test_rollouts_that_do_not_leave_after_the_end_are_cancelled(cluster, slurm, run_in_bash):
    run = cluster("elastic.leave_s=0")
    (run.directory / "launch" / "rollouts").write_text("rollout-0\nrollout-1\n")
    (slurm / "queue").write_text("one that waits for a controller\n")
    script = run_script(run).replace("SECONDS + 30", "SECONDS + 1").replace("sleep 2", "true")
    assert run_in_bash(script).wait(60) == 0
    names = [f"--name={run.label}.rollout-{index}" for index in (0, 1)]
    expected = [*(f"scancel --state=PENDING {name}" for name in names), *(f"scancel {name}" for name in names)]
    assert calls(slurm, "scancel") == expected


def test_a_rollout_that_leaves_before_the_end_waits_for_slurm_to_end_its_job(cluster, slurm, run_in_bash):
    run = cluster()
    (run.directory / "controller.json").write_text("{}")
    job = run_in_bash(rollout_script(run, run.rollouts()[0]).replace("sleep 600", "echo held; sleep 0"), stdout=-1)
    assert "held" in job.communicate(timeout=60)[0]


def test_start_submits_each_job_once(cluster, slurm):
    run = cluster("rollout.replicas=2")
    assert Slurm().start(run) == ["rollout-0: job 7", "rollout-1: job 7", "run: job 7"]
    assert calls(slurm, "sbatch")[0] == (
        f"sbatch --parsable --job-name={run.label}.rollout-0 {run.directory}/launch/rollout.sbatch"
    )
    (slurm / "queue").write_text(f"7|{run.label}.run|PENDING|Resources\n8|other.run|RUNNING|None\n")
    assert Slurm().alive(run) == {"run": "PENDING (Resources)"}
    with pytest.raises(UserError, match=r"has jobs already: run PENDING \(Resources\)"):
        launch("slurm", run, resume=False)


@pytest.mark.parametrize("now", [False, True])
def test_stop_cancels_all_jobs_of_the_run(cluster, slurm, now):
    run = cluster()
    (slurm / "queue").write_text(
        f"7|{run.label}.run|RUNNING|None\n8|other.run|RUNNING|None\n9|{run.label}.rollout-0|PENDING|None\n"
    )
    word = "killed" if now else "cancelled"
    assert Slurm().stop(run, now=now) == [f"run: {word}", f"rollout-0: {word}"]
    assert calls(slurm, "scancel") == [*(["scancel --full --signal=KILL 7 9"] if now else []), "scancel 7 9"]
    (slurm / "queue").write_text("")
    assert Slurm().stop(run, now=now) == []


def test_jobs_before_a_refused_one_are_cancelled(cluster, slurm):
    run = cluster()
    (slurm / "bin" / "sbatch").write_text(
        f'#!/bin/bash\ncase "$*" in *.run\\ *) echo "sbatch: error: no such account" >&2; exit 1;; esac\n'
        f'echo "7|{run.label}.rollout-0|PENDING|None" > {slurm}/queue; echo 7'
    )
    with pytest.raises(UserError, match="sbatch: error: no such account"):
        launch("slurm", run, resume=False)
    assert calls(slurm, "scancel")[-1] == "scancel 7"


def test_scaling_submits_and_cancels_rollouts(cluster, slurm):
    run = cluster("rollout.replicas=2")
    names = ("run", "rollout-0", "rollout-2", "rollout-10")
    queue = [f"{number}|{run.label}.{name}|RUNNING|None\n" for number, name in enumerate(names)]
    (slurm / "queue").write_text("".join(queue))
    launched = Launched.of(run.directory)
    assert launched.alive()["rollout-10"] == "RUNNING"
    assert launched.scale({"rollout": 5}) == ["rollout-1: job 7", "rollout-3: job 7"]
    assert launched.scale({"rollout": 1}) == ["rollout-2: cancelled", "rollout-10: cancelled"]
    assert calls(slurm, "scancel") == ["scancel 2 3"]

    with pytest.raises(UserError, match=r"launch it with --resume policy\.replicas=2"):
        launched.scale({"policy": 2})
    with pytest.raises(UserError, match="at least one rollout worker must stay"):
        launched.scale({"rollout": 0})
    assert Launched.of(slurm) is None


def test_rollouts_that_are_leaving_do_not_count_and_keep_their_names(cluster, slurm):
    run = cluster("rollout.replicas=3")
    states = {"rollout-0": "RUNNING", "rollout-1": "COMPLETING", "rollout-2": "COMPLETING"}
    (slurm / "queue").write_text("".join(f"5|{run.label}.{name}|{state}|None\n" for name, state in states.items()))
    assert Slurm().scale(run, {"rollout": 3}) == ["rollout-3: job 7", "rollout-4: job 7"]
    assert (run.directory / "launch" / "rollouts").read_text().split() == ["rollout-0", "rollout-3", "rollout-4"]
    assert Slurm().scale(run, {"rollout": 1}) == []


def test_rollouts_before_a_refused_one_are_remembered(cluster, slurm):
    run = cluster()
    (slurm / "bin" / "sbatch").write_text('#!/bin/bash\ncase "$*" in *rollout-1*) exit 1;; esac; echo 7\n')
    with pytest.raises(UserError, match="exit code 1"):
        Slurm().scale(run, {"rollout": 2})
    assert (run.directory / "launch" / "rollouts").read_text().split() == ["rollout-0"]


def test_with_gang_rollouts_are_parts_of_the_job(cluster, slurm):
    run = cluster("rollout.replicas=2", "cluster.slurm.gang=true")
    (slurm / "queue").write_text(f"7|{run.label}.run|PENDING|Resources\n")
    assert Slurm().alive(run) == dict.fromkeys(["run", "rollout-0", "rollout-1"], "PENDING (Resources)")
    with pytest.raises(UserError, match=r"parts of the run's job; .* with --resume rollout\.replicas=4"):
        Slurm().scale(run, {"rollout": 4})


@pytest.mark.parametrize(
    ("ranks", "rollouts", "nodes", "places"),
    [
        (4, 5, 3, [(1, "1-1"), (1, "2-2"), (1, "3-3"), (1, "4-4"), (2, "1-1")]),
        (1, 2, 3, [(1, None), (2, None)]),
        (4, 1, 2, [(1, "1-1")]),
    ],
)
def test_with_gang_rollouts_share_a_machine_each_with_gpus_of_its_own(cluster, ranks, rollouts, nodes, places):
    gang = ("cluster.slurm.gang=true", "cluster.slurm.cpus_per_task=8")
    script = run_script(cluster(f"policy.ranks_per_node={ranks}", f"rollout.replicas={rollouts}", *gang))
    options = {line.removeprefix("#SBATCH --") for line in script.splitlines()}
    cpus = 8 * min(ranks, rollouts)
    assert {f"nodes={nodes}", f"gpus-per-node={ranks}", f"cpus-per-task={cpus}"} <= options
    assert f"--cpus-per-task={cpus})" in script
    steps = re.findall(r"^keep --nodes=1 --ntasks=1 --relative=(\d) .*?(?:-f(\d-\d) .*)?--name rollout", script, re.M)
    assert [(int(node), gpus or None) for node, gpus in steps] == places


def test_a_rollout_of_several_gpus_has_its_part_of_those_of_the_machine(cluster, slurm):
    run = cluster(program='echo "$CUDA_VISIBLE_DEVICES"')
    step = _step(run, replace(run.rollouts()[0], gpus=2), first=1, slot=1)
    visible = {**os.environ, "CUDA_VISIBLE_DEVICES": "4,5,6,7"}
    done = subprocess.run(["bash", "-c", f"srun {step}"], env=visible, capture_output=True, text=True, check=True)
    assert done.stdout == "6,7\n"


def test_before_a_time_limit_there_are_two_jobs_of_a_name(cluster, slurm):
    run = cluster()
    (slurm / "queue").write_text(
        f"7|{run.label}.run|RUNNING|None\n8|{run.label}.run|PENDING|Dependency\n"
        f"3|{run.label}.rollout-0|RUNNING|None\n9|{run.label}.rollout-0|PENDING|Dependency\n"
    )
    state = "RUNNING, PENDING (Dependency)"
    assert Slurm().alive(run) == {"run": state, "rollout-0": state}
    assert Slurm().scale(run, {"rollout": 1}) == []
    assert Slurm().stop(run, now=False) == ["run: cancelled", "rollout-0: cancelled"]
    assert calls(slurm, "scancel") == ["scancel 7 8 3 9"]


def test_a_cluster_without_gpus_is_an_error_with_the_key(cluster, slurm):
    text = "sbatch: error: Batch job submission failed: Invalid generic resource (gres) specification"
    (slurm / "bin" / "sbatch").write_text(f'#!/bin/bash\necho "{text}" >&2; exit 1\n')
    with pytest.raises(UserError, match=r"Invalid generic resource .*; .* set \[cluster\] gpus = false"):
        launch("slurm", cluster(), resume=False)


def test_without_slurm_the_message_names_the_command(cluster, monkeypatch, tmp_path):
    run = cluster()
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    with pytest.raises(UserError, match="squeue is not installed here: run this on a machine that submits jobs"):
        launch("slurm", run, resume=False)


def test_wrong_recipes_and_platforms_are_refused(cluster):
    with pytest.raises(UserError, match="not an option of sbatch"):
        cluster('cluster.slurm.extra=["reservation"]')
    with pytest.raises(UserError, match="slurmm"):
        find_launcher("slurmm")
    assert isinstance(find_launcher("slurm"), Slurm)
