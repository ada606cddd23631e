"""Session environments, each for one thing that a test is about; loaded by template processes by name."""

import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from shmrl.env import Generated, SessionEnvironment, Step
from shmrl.types import Task


class EchoAction(BaseModel):
    model_config = ConfigDict(extra="forbid")
    message: str = ""
    metadata: dict[str, Any] = {}


class EchoObservation(BaseModel):
    done: bool = False
    reward: float | None = None
    metadata: dict[str, Any] = {}
    echoed: str = ""
    seed: int | None = None


class EchoState(BaseModel):
    episode_id: str | None = None
    step_count: int = 0


class OpenEcho:
    """In OpenEnv's shape: typed actions, observations with reward and done, a state. Does what the recorded one did."""

    def __init__(self):
        self.seed, self.n, self.state = None, 0, EchoState()

    def reset(self, seed=None, episode_id=None, **kw):
        self.seed, self.n, self.state = seed, 0, EchoState(episode_id=episode_id)
        return EchoObservation(echoed="ready", seed=seed, metadata={"kw": kw})

    def step(self, action: EchoAction) -> EchoObservation:
        act(action.message)
        self.n += 1
        self.state.step_count = self.n
        text = action.message
        return EchoObservation(echoed=text, seed=self.seed, reward=len(text), done=self.n >= 3, metadata={"n": self.n})


class TextEcho:
    """In Gymnasium's shape, texts in and out, with a data set: what AgileRL hosts."""

    dataset_size = 10

    def reset(self, seed=None, row_index=None, evaluation=None):
        number = random.Random(seed).randrange(100)
        return f"guess {number} row={row_index} eval={evaluation}", {"seed": seed}

    def step(self, action):
        act(action)
        return "done", 1.0, True, False, {"ok": False}


def act(text):
    """boom raises, `sleep 3` sleeps, exit ends the process, nan..."""
    command, _, argument = text.partition(" ")
    if command == "boom":
        raise RuntimeError("boom in env")
    if command == "sleep":
        time.sleep(float(argument))
    if command == "exit":
        os._exit(int(argument))


class Recording(SessionEnvironment):
    """Writes what is done to it into `directory`, a file per session."""

    def __init__(self, directory):
        self.directory = Path(directory)

    def _note(self, what):
        with (self.directory / str(os.getpid())).open("a") as file:
            file.write(what + "\n")

    def reset(self, seed: int, **data: Any):
        self._note("reset")
        return "ready"

    def step(self, action):
        self._note(f"step {action}")
        act(action)
        return Step("ok", 1.0)

    def close(self):
        self._note("close")


class GlobalSeed(SessionEnvironment):
    """Draws its problem from the process's own generator, as GEM's environments do, and dawdles over it."""

    def __init__(self):
        self.words = {f"word{i}" for i in range(1000)}  # a set: its order depends on the interpreter's hash seed

    def reset(self, seed: int, **data: Any):
        random.seed(seed)
        words = []
        for _ in range(8):
            time.sleep(0.001)
            words.append(random.choice(list(self.words)))
        return " ".join(words)

    def step(self, action):
        return Step(str(random.random()))


class Rows(SessionEnvironment):
    """Has a task set."""

    def tasks(self, split):
        return Generated(lambda i: Task(f"{split}-{i}", {"text": f"{split} {i}"}, i), 5)

    def reset(self, seed: int, text: str):
        return f"{text} {seed}"

    def step(self, action):
        return Step("ok")


class Threaded(TextEcho):
    """Has a thread from the moment it is loaded."""

    def __init__(self):
        self.woken = threading.Event()
        threading.Thread(target=self.woken.wait, daemon=True).start()


class Littering(TextEcho):
    """Leaves a child of its own session behind, and says its pid."""

    def step(self, action):
        command = (
            "import os, subprocess; os.setsid()\n"
            "print(subprocess.Popen(['sleep', '600'], stdout=subprocess.DEVNULL).pid)"
        )
        child = subprocess.run([sys.executable, "-c", command], stdout=subprocess.PIPE, check=True, text=True)
        return child.stdout.strip(), 0.0, False, False, {}


class Heavy(TextEcho):
    """Gives answers that JSON cannot carry, or that nobody can read, if asked to."""

    def step(self, action):
        if action == "much":
            return "x" * (8 << 20), 0.0, False, False, {}
        return {"prompt": "x", "what": {1, 2}}, float(action), False, False, {}


class DyingAtStart:
    def __init__(self):
        os._exit(3)


class Raising:
    def __init__(self):
        raise RuntimeError("the data set moved to the moon")


class Gated(TextEcho):
    """Is not loaded before there is a file `open` in `directory`."""

    def __init__(self, directory):
        while not (Path(directory) / "open").exists():
            time.sleep(0.01)
