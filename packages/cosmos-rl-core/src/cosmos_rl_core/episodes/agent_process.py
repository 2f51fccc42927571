"""The program of [agent] command, once for each rollout: its environment, its end, what it wrote."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from cosmos_rl_core.episodes.agent_rollout import AgentRollout
from cosmos_rl_core.errors import SampleError, UserError
from cosmos_rl_core.processes import ChildProcess, OrphanGuard, environment, last_lines
from cosmos_rl_core.wire.handshake import TOKEN_VARIABLE
from cosmos_rl_core.wire.tls import TLS_VARIABLE

LINGER_S = 5.0
"""Maximum seconds that a program runs after it has ended its rollout."""
LONGEST_ROW = 64 * 2**10
"""Characters of a row that go into a variable; systems limit the length of one."""


class AgentCommand:
    """Starts the program, and kills it with all that it has started.

    await command.play(rollout, base_url="http://127.0.0.1:4000/v1")          # until the rollout has ended
    """

    def __init__(self, words: Sequence[str], *, rewards_itself: bool) -> None:
        """rewards_itself: whether the program alone gives rewards. Raises UserError for one that is not installed."""
        if shutil.which(words[0]) is None:
            raise UserError(f"[agent] command = {list(words)}: there is no program {words[0]!r}; write its whole path")
        self._words, self._rewards_itself = words, rewards_itself
        self._guard: OrphanGuard | None = None

    def close(self) -> None:
        """Call it once nothing is played any more."""
        if self._guard is not None:
            self._guard.close()

    async def play(self, rollout: AgentRollout, *, base_url: str) -> None:
        """Run the program. Raises SampleError if it ends without an end of the rollout."""
        if self._guard is None:
            self._guard = OrphanGuard()
        with tempfile.TemporaryDirectory(prefix="cosmos-rl-agent-") as folder, tempfile.TemporaryFile() as log:
            variables = {**environment(), **self._variables(rollout, base_url, Path(folder))}
            for secret in (TOKEN_VARIABLE, TLS_VARIABLE):
                variables.pop(secret, None)
            try:
                child = ChildProcess(self._words, environment=variables, output=log)
            except OSError as error:
                raise SampleError(f"[agent] command cannot be started: {error}") from error
            self._guard.watch(child.pid, grace_s=0.0)
            over = asyncio.ensure_future(rollout.ended())
            ending = asyncio.ensure_future(child.ended())
            try:
                await asyncio.wait({over, ending}, return_when=asyncio.FIRST_COMPLETED)
                if not rollout.is_over:
                    self._end(rollout, child, last_lines(log))
                await asyncio.wait({ending}, timeout=LINGER_S)
                await over
            finally:
                child.kill()
                over.cancel()
                await asyncio.gather(over, return_exceptions=True)
                await asyncio.shield(ending)
                self._guard.forget(child.pid)

    def _end(self, rollout: AgentRollout, child: ChildProcess, output: str) -> None:
        """End the rollout of a program that has ended without doing so."""
        if child.exit_code == 0 and not self._rewards_itself:
            rollout.end()
        elif child.exit_code == 0:
            rollout.end(
                problem="the agent ended and gave no reward: send one with POST /rollouts/ID/done, or name "
                "[[reward.functions]]"
            )
        else:
            rollout.end(problem=f"the agent ended with {child.status} before its rollout:\n{output}")

    def _variables(self, rollout: AgentRollout, base_url: str, folder: Path) -> Mapping[str, str]:
        row = json.dumps(rollout.prompt.row)
        if len(row) <= LONGEST_ROW:
            of_row = {"COSMOS_RL_ROW": row}
        else:
            path = folder / "row.json"
            path.write_text(row)
            of_row = {"COSMOS_RL_ROW_FILE": str(path)}
        host = urlsplit(base_url).hostname or ""
        direct = {name: ",".join(filter(None, [os.environ.get(name), host])) for name in ("no_proxy", "NO_PROXY")}
        return {
            **direct,
            "OPENAI_BASE_URL": base_url,
            "OPENAI_API_KEY": rollout.key,
            "COSMOS_RL_ROLLOUT": rollout.id,
            "COSMOS_RL_DONE_URL": done_url(base_url, rollout),
            **of_row,
        }


def done_url(base_url: str, rollout: AgentRollout) -> str:
    """Return where the reward of a rollout is sent."""
    return f"{base_url.removesuffix('/v1')}/rollouts/{rollout.id}/done"
