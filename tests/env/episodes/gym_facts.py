"""What an installed NeMo Gym says of itself, as one line of JSON. Run by its own interpreter; stdin has answers of
`/run` that its models must accept."""

import json
import sys
from importlib.metadata import version
from typing import get_args

from nemo_gym.config_types import ServerTypeConfig
from nemo_gym.episode_types import BaseEpisodeResponse
from nemo_gym.failure_kinds import FAILURE_KINDS, FailureStage
from nemo_gym.server_utils import _TELEMETRY_SERVER_TYPE_BY_BASE

for line in sys.stdin:
    BaseEpisodeResponse[dict].model_validate_json(line)
facts = {
    "version": version("nemo-gym"),
    "server_types": [kind.SERVER_TYPE for kind in get_args(ServerTypeConfig)],
    "telemetry_types": list(_TELEMETRY_SERVER_TYPE_BY_BASE.values()),
    "failure_kinds": sorted(FAILURE_KINDS),
    "stages": list(get_args(FailureStage)),
}
print(json.dumps(facts))
