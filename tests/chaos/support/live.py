"""A run that goes on while tests kill and stop its processes at the points of `faults`."""

import json
import signal
import time

import faults
from lives import must_have_trained_once, num_lines

PROMPTS, GROUP, SILENCE_S = 4, 4, 4.0
POLICIES = ROLLOUTS = 2


def recipe_of_live_run(bandit, directory):
    return bandit(
        directory,
        run__domain="faults:DOMAIN",
        run__max_steps=100_000,  # it is stopped
        policy__prompts_per_step=PROMPTS,
        policy__replicas=POLICIES,
        sync__max_staleness=0,
        checkpoint__every_steps=5,
        rollout__group_size=GROUP,
        rollout__replicas=ROLLOUTS,
        rollout__options={"delay_s": 0.01},
        elastic={
            "restart_workers": 100,
            "restart_controller": 100,
            "suspect_grace_s": 0.5,
            "silence_s": SILENCE_S,
        },
        logging__sinks=["console", "jsonl"],
    )


class LiveRun:
    def __init__(self, process, directory, *, wait_for):
        self.process, self.directory, self._wait_for = process, directory, wait_for

    def wait(self, condition, what):
        def holds():
            assert self.process.poll() is None, self.process.communicate()
            return condition()

        return self._wait_for(holds, what)

    def wait_for_step(self):
        done = num_lines(self.directory / "metrics.jsonl")
        self.wait(lambda: num_lines(self.directory / "metrics.jsonl") > done, "a step")

    def wait_for_members(self, role, count):
        """Wait until so many of a role work; those that are suspected, start again or wait for weights do not."""

        def ready():
            members = json.loads((self.directory / "status.json").read_text())["members"]
            work = [member["role"] for member in members if member["state"] == "ready" and not member["phase"]]
            return work.count(role) == count

        self.wait(lambda: (self.directory / "status.json").exists() and ready(), f"{count} of {role}")

    def strike(self, point, victim, fault=faults.KILL):
        """Let a process die at a point, and wait for the next step."""
        faults.arm(self.directory, point, victim, fault)
        self.wait(lambda: faults.fired(self.directory), point)
        died_at = time.monotonic()
        self.wait_for_step()
        print(f"{point}: a step {time.monotonic() - died_at:.2f} s later")

    def strike_policy(self, point, victim):
        """The same, with the other policy there: otherwise the run would go back to a checkpoint."""
        self.wait_for_members("policy", POLICIES)
        self.strike(point, victim)

    def strike_rollout(self, point, victim, fault=faults.KILL):
        """The same, with the other rollout worker there, which takes the prompts."""
        self.wait_for_members("rollout", ROLLOUTS)
        self.strike(point, victim, fault)

    def strike_controller(self, point, *, meanwhile=lambda: None):
        """Let the controller die at a point, and wait for the next one and a step."""
        before = self._generation()
        faults.arm(self.directory, point, faults.CONTROLLER)
        meanwhile()
        self.wait(lambda: faults.fired(self.directory), point)
        died_at = time.monotonic()
        self.wait(lambda: self._generation() == before + 1, "the next controller")
        serving_s = time.monotonic() - died_at
        self.wait_for_step()
        print(f"{point}: the next controller {serving_s:.2f} s later, a step {time.monotonic() - died_at:.2f} s")

    def _generation(self):
        return json.loads((self.directory / "controller.json").read_text())["generation"]

    def must_have_trained_once(self):
        """Stop the run; check that every sample was trained once, at the step of a run that nobody disturbed."""
        self.wait_for_step()
        self.process.send_signal(signal.SIGINT)
        _, errors = self.process.communicate(timeout=60)
        assert self.process.returncode == 130, errors
        return must_have_trained_once(self.directory, prompts=PROMPTS, group=GROUP)
