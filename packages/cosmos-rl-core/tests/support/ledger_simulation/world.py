"""The simulated world: one clock, one stream of random numbers, a network that loses and reorders, and misfortunes."""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Callable
from random import Random

from cosmos_rl_core.control import protocol as p
from cosmos_rl_core.control.ledger import events
from cosmos_rl_core.control.ledger.ledger import Ledger
from cosmos_rl_core.control.ledger.records import Position
from cosmos_rl_core.control.ledger.state import LedgerConfig
from cosmos_rl_core.data.curriculum import Curriculum
from ledger_simulation.controller import FakeController
from ledger_simulation.options import Options, Report
from ledger_simulation.replicas import FakePolicy, FakeReplica, FakeRollout

CALM_DELAY_S = 0.005
ROWS = 7
"""Of the data, in runs with a curriculum: those of odd seeds."""


class World:
    """Runs until all steps are committed for good."""

    LONGEST_DELAY_S = 3.0

    def __init__(self, seed: int, options: Options, ledger: type[Ledger]) -> None:
        self.options = options
        self.report = Report(seed)
        self.random = Random(seed)
        self.now = 0.0
        self._agenda: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._planned = 0
        self.published = (0, 0)
        """(lineage, version) of the newest weights rollout replicas can load."""
        self.positions = {0: Position(0, 0)}
        """Version -> its stream position, as a checkpoint has it."""
        self.files: defaultdict[str, dict[str, str]] = defaultdict(dict)
        """Replica -> path -> content of the groups that its machine stores."""
        self.unreadable: set[int] = set()
        """Delivered samples whose payload is gone."""
        config = LedgerConfig(
            groups_per_step=options.groups_per_step,
            max_staleness=options.max_staleness,
            max_steps=options.max_steps,
            policy_members=1,
            lease_ttl_s=8.0,
            silence_s=6.0,
            stall_s=12.0,
            peer_s=2.0,
            max_failed=10**9,
            max_filtered=10**9,
            max_losses=10**9,
            curriculum=Curriculum(
                num_rows=ROWS,
                row_of=lambda sample: sample % ROWS,
                visits=2,
                min_chance=0.2,
                failed_reward=0.0,
                solved_reward=1.0,
                seed=seed,
            )
            if seed % 2
            else None,
        )
        self.controller = FakeController(self, config, ledger)
        self.replicas: dict[str, FakeReplica] = {}
        for number in range(options.policies):
            self.replicas[f"policy-{number}"] = FakePolicy(self, f"policy-{number}")
        for number in range(options.rollouts):
            self.replicas[f"rollout-{number}"] = FakeRollout(self, f"rollout-{number}")

    @property
    def is_calm(self) -> bool:
        """Whether faults have stopped."""
        return self.now >= self.options.faults_until_s

    def run(self) -> Report:
        """Play the run; raises AssertionError at the first broken rule."""
        for replica in self.replicas.values():
            self.after(self.random.uniform(0.0, 1.0), replica.start)
        self.after(self.random.expovariate(1 / self.options.mean_between_faults_s), self.misfortune)
        self.after(self.random.expovariate(1 / self.options.mean_between_losses_s), self.lose_a_payload)
        if self.options.mean_between_pauses_s < math.inf:
            self.after(self.random.expovariate(1 / self.options.mean_between_pauses_s), self.pause)
        deadline = self.options.faults_until_s + self.options.finish_within_s
        while not (self.is_calm and self.controller.is_done):
            self.now, _, action, args = heapq.heappop(self._agenda)
            if self.now > deadline:
                waits = "\n".join(self.controller.ledger.waits())
                raise AssertionError(f"not done {self.options.finish_within_s} s after the last fault:\n{waits}")
            action(*args)
        self.report.simulated_s, self.report.records = self.now, self.controller.num_records
        self.report.digest = self.controller.check_end()
        return self.report

    def after(self, delay_s: float, action: Callable[..., None], *args: object) -> None:
        self._planned += 1
        heapq.heappush(self._agenda, (self.now + delay_s, self._planned, action, args))

    # --- the network ----------------------------------------------------------------------------------

    def soon(self, event: events.Join | events.Disconnected | events.Gone) -> None:
        """Connections open and close in order; only a controller that is down misses it."""
        self.after(0.001, self.controller.take, event)

    def to_controller(self, event: events.Event) -> None:
        for delay in self._arrivals():
            self.after(delay, self.controller.take, event)

    def to_replica(self, output: events.To) -> None:
        replica = self.replicas[output.replica]
        self.controller.invariants.sent(output.message)
        for delay in self._arrivals():
            self.after(delay, replica.receive, output.message, replica.process)

    def _arrivals(self) -> list[float]:
        options, random = self.options, self.random
        if self.is_calm or not options.repeats:
            return [CALM_DELAY_S]  # in order, as on a connection
        if random.random() < options.drop:
            return []
        times = 2 if random.random() < options.duplicate else 1
        return [
            random.uniform(0.0, self.LONGEST_DELAY_S)
            if random.random() < options.long_delay
            else 0.001 + 0.02 * random.random()
            for _ in range(times)
        ]

    def reconnect_all(self) -> None:
        """The controller is back: living processes connect to it again."""
        for replica in self.replicas.values():
            if replica.is_alive:
                replica.later(self.random.uniform(0.0, 1.0), replica.connect)

    def publish(self, replica: str, lineage: int, version: int, weights: str) -> None:
        """Make weights available to rollout replicas, if they are what the lineage says."""
        if lineage == self.controller.invariants.history.lineage:
            self.controller.invariants.applied(replica, version, weights)
            self.published = max(self.published, (lineage, version))

    # --- misfortunes ----------------------------------------------------------------------------------

    def misfortune(self) -> None:
        """Let something bad happen, and the next one later."""
        if self.is_calm:
            return
        self.after(self.random.expovariate(1 / self.options.mean_between_faults_s), self.misfortune)
        luck = self.random.random()
        victim = self.random.choice(self._of_role(self.random.choice(("policy", "rollout", "rollout"))))
        if luck < 0.05:
            for replica in self._of_role("policy"):
                self.kill(replica)
        elif luck < 0.1:
            self.controller.crash()
        elif luck < 0.2:
            self.controller.crashes_at_next_decision = True
        elif luck < 0.5:
            self.kill(victim)
        elif luck < 0.6:
            self.leave(victim)
        elif luck < 0.7:
            self.report.accusations += 1
            accuser = self.random.choice(self._of_role("policy"))
            assert isinstance(accuser, FakePolicy)
            accuser.accuse()
        elif luck < 0.85:
            self.report.hangs += 1
            victim.hang(self.random.choice((1.0, 5.0, 20.0)), beats=self.random.random() < 0.5)
        else:
            self.cut(victim)

    def pause(self) -> None:
        """Stop processes for a while, or let the controller's clock jump, and again later."""
        if self.is_calm:
            return
        self.after(self.random.expovariate(1 / self.options.mean_between_pauses_s), self.pause)
        self.report.pauses += 1
        what, duration_s = self.random.choice(self.options.pauses_of), self.random.choice((1.0, 6.5, 7.5, 30.0))
        if what == "clock":
            self.controller.clock_jumped_s += duration_s
        if what in ("controller", "all"):
            self.controller.pause(duration_s)
        stopped = list(self.replicas.values()) if what == "all" else []
        for replica in [self.random.choice(list(self.replicas.values()))] if what == "replica" else stopped:
            replica.hang(duration_s, beats=False)

    def lose_a_payload(self) -> None:
        """Let the file of a group that waits for its step be gone, and the next one's later."""
        if self.is_calm:
            return
        self.after(self.random.expovariate(1 / self.options.mean_between_losses_s), self.lose_a_payload)
        history = self.controller.invariants.history
        assigned = history.assigned.samples if history.assigned is not None else ()
        stored = sorted(history.ready.union(assigned))
        if stored:
            self.unreadable.add(self.random.choice(stored))

    def _of_role(self, role: p.Role) -> list[FakeReplica]:
        return [replica for replica in self.replicas.values() if replica.role == role]

    def kill(self, replica: FakeReplica) -> None:
        """Kill a process; one in ten never comes back, but for the last of its role."""
        if replica.is_alive:
            self.report.kills += 1
            lasting = [r for r in self._of_role(replica.role) if not r.is_lost_for_good]
            if len(lasting) > 1 and self.random.random() < 0.1:
                replica.is_lost_for_good = True
            replica.kill()

    def leave(self, replica: FakeReplica) -> None:
        """Let a process leave, unless it hangs."""
        if replica.is_alive and not replica.is_hung:
            self.report.goodbyes += 1
            replica.leave()

    def cut(self, replica: FakeReplica) -> None:
        """Close the connection; the process comes back within the grace or after it."""
        if replica.is_alive and replica.incarnation:
            self.report.cuts += 1
            self.soon(events.Disconnected(replica.name, replica.incarnation))
            replica.later(self.random.choice((0.2, 1.0, 5.0)), replica.connect)
