"""As much of GEM as shmrl touches, in its shapes: a registry, an environment that draws, one that runs programs."""

import random

from gem.core import Env
from gem.utils.sandbox import run_python

built = []


class Dice(Env):
    """Says a number drawn from Python's global generator; naming it ends the episode and pays."""

    def __init__(self, sides=6, **_):
        self.sides = sides
        built.append(self)

    def reset(self, seed=None):
        random.seed(seed)
        self.thrown, self.tries = random.randint(1, self.sides), 0
        return f"{self.sides} sides, {self.thrown}", {}

    def step(self, action):
        self.tries += 1
        return "seen", float(action == str(self.thrown)), action == str(self.thrown), self.tries >= 2, {}


class Code(Env):
    """Runs the action with this input and pays for this output."""

    def __init__(self, sandbox_type="none", **_):
        self.sandbox_type = sandbox_type

    def reset(self, seed=None):
        return "print what is doubled", {}

    def step(self, action):
        ok, stdout, stderr = run_python(action, self.sandbox_type, "21")
        return stderr, float(ok and stdout.strip() == "42"), True, True, {}


REGISTRY = {"game:Dice-v0": Dice, "code:Double": Code}


def make(env_id, **kwargs):
    if env_id not in REGISTRY:
        raise ValueError(f"Environment {env_id} not found in registry.")
    return REGISTRY[env_id](**kwargs)
