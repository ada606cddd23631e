"""OpenEnv's own client, and AgileRL's, drive our server. `.ci/run interop` and `.ci/run clients` make their
environments; by hand, set SHMRL_OPENENV_PYTHON or SHMRL_AGILERL_PYTHON."""

import asyncio
import json
import os
from pathlib import Path

import pytest

pytestmark = pytest.mark.interop
PLACES = 16


async def drive(client, name):
    """What the other side saw."""
    python = os.environ.get(f"SHMRL_{name.upper()}_PYTHON")
    if python is None:
        pytest.skip(f"SHMRL_{name.upper()}_PYTHON is not set")
    script = Path(__file__).parent / "clients.py"
    process = await asyncio.create_subprocess_exec(
        *(python, str(script), name, client.server.url, str(PLACES)), stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    assert process.returncode == 0
    return json.loads(out.splitlines()[-1])


@pytest.mark.parametrize("name", ["openenv", "agilerl"])
async def test_sixteen_sessions_two_groups_and_one_too_many(sessions, name):
    async with sessions("GlobalSeed", max_concurrent_envs=PLACES) as client:
        saw = await drive(client, name)
        print(f"{name} {saw['version']}: {saw['refusal']}")
        groups = dict.fromkeys(zip(saw["seeds"], saw["problems"], strict=True))
        assert len(groups) == len({problem for _, problem in groups}) == 2
        assert saw["rewards"] == [0.0] * PLACES
        assert "CAPACITY_REACHED" in saw["refusal"]
        assert "16/16" in saw["refusal"]
        await client.free(timeout_s=5)
