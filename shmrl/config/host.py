"""The tables of a host: `[arena]`, the pool of shared memory, and `[node]`, the server that other hosts read it by."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from shmrl.config.tables import Count, HostPort, Table, reachable
from shmrl.units import parse_bytes, parse_shares

FETCHED = "fetched"  # the source of copies of other nodes' blocks, in their tags
SPILL_AFTER_S = 0.5  # arena.timeout_s where writers may spill


class ArenaConfig(Table):
    """`[arena]`: the pool of shared memory."""

    address: str | None = None
    """Of an arena that is there already; `run` and `shmrl node` write it into the files of the other roles."""
    token_file: Path | None = None
    """The file with the run's token; written as address is."""
    capacity: int | str | None = None
    """Bytes or a size ("8GiB"); without it half of what is available."""
    backing: Literal["shm", "memfd", "file"] = "shm"
    """shm: /dev/shm. memfd: no mount, gone with its last process. file: in the directory base."""
    base: Path | None = None
    """With backing = "file": a directory, of a tmpfs mounted with huge= for example."""
    huge_pages: Literal["auto", "always", "never"] = "auto"
    """auto: what mount or shmem_enabled give. always: asks the kernel each time, and refuses to start without."""
    numa: Annotated[str, Field(pattern=r"^(none|interleave|bind:\d+(-\d+)?(,\d+(-\d+)?)*)$")] = "none"
    """Where the pages go: none, "interleave" over the nodes, or "bind:0-1,3"."""
    on_full: Literal["block", "raise", "spill"] = "block"
    """A writer that finds no room waits for timeout_s, fails at once, or goes into a file under spill_dir."""
    spill_dir: Path | None = None
    """With on_full = "spill": a directory of a local disk."""
    timeout_s: Annotated[float, Field(gt=0)] = 60.0
    """How long a writer waits for room; 0.5 with "spill", as a file costs less than a long wait."""
    verify: bool = False
    """Check the checksum of every row that is read."""
    preallocate: bool = False
    """Commit the whole capacity at the start instead of ahead of its use."""
    orphan_ttl_s: Annotated[float, Field(gt=0, le=1 << 31)] = 600.0
    """Seconds after which a block whose owner died is freed."""
    retain_steps: Count = 0
    """Last steps whose blocks are kept after their use, for `shmrl replay export` and for ranks that restart."""
    shares: dict[str, float | int | str] = Field(default_factory=dict)
    """What sources can count on: parts of the capacity (0.5) or sizes ("2GiB"); beyond it they borrow what is idle."""
    fetch_capacity: float | int | str | None = None
    """What copies of other nodes' blocks can count on, as in shares."""
    transport: Literal["required", "preferred"] = "preferred"
    """required: refuse a run whose trainer would fetch blocks over HTTP. preferred: shared memory where it can."""

    @property
    def guaranteed(self) -> dict[str, float | int | str]:
        """`shares`, and that of the copies: "fetched" is the source in their tags."""
        return self.shares if self.fetch_capacity is None else {**self.shares, FETCHED: self.fetch_capacity}

    @model_validator(mode="before")
    @classmethod
    def _spills_soon(cls, given: Any) -> Any:
        spills = isinstance(given, dict) and given.get("on_full") == "spill"
        return {"timeout_s": SPILL_AFTER_S, **given} if spills else given

    @model_validator(mode="after")
    def _capacity(self) -> ArenaConfig:
        try:
            if self.capacity is not None and parse_bytes(self.capacity) < 1 << 20:
                raise ValueError("is below 1MiB")
        except ValueError as error:
            raise ValueError(f"capacity = {self.capacity!r}: {error}") from None
        return self

    @model_validator(mode="after")
    def _shares(self) -> ArenaConfig:
        sizes = [source for source, share in self.guaranteed.items() if not isinstance(share, float)]
        if sizes and self.capacity is None:
            raise ValueError(f"shares of {', '.join(sizes)} are sizes: they need capacity (or give fractions, as 0.5)")
        parse_shares(self.guaranteed, 1 << 47 if self.capacity is None else parse_bytes(self.capacity))
        return self

    @model_validator(mode="after")
    def _spill(self) -> ArenaConfig:
        if (self.on_full == "spill") != (self.spill_dir is not None):
            raise ValueError("spill_dir (an existing directory) belongs to on_full = 'spill', and only there")
        return self

    @model_validator(mode="after")
    def _base(self) -> ArenaConfig:
        if (self.backing == "file") != (self.base is not None):
            raise ValueError(
                "base (a directory, of a mount that holds the arena) belongs to backing = 'file', and only there"
            )
        return self


class NodeConfig(Table):
    """`[node]`: the server that others read this node's blocks from, and that fetches theirs, once for all ranks."""

    address: Annotated[HostPort, AfterValidator(reachable)] | None = None
    """"host:port" at which other nodes reach it; without it there is no server, and ranks fetch by themselves. Over
    several nodes every node has one, at an address of its own."""
    certificate: Path | None = None
    """A PEM file that makes it an https server."""
    key: Path | None = None
    """The certificate's key."""
    ca: Path | None = None
    """The file that other nodes' servers are checked by."""

    @property
    def url(self) -> str | None:
        """Of this node's own server."""
        return self.address and f"{'https' if self.certificate else 'http'}://{self.address}"

    @model_validator(mode="after")
    def _servable(self) -> NodeConfig:
        if (self.certificate is None) != (self.key is None):
            raise ValueError("certificate and key belong together")
        return self
