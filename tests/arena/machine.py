"""The arena's model: a dict of what every block must be, the errors that every verb must then raise, and what sources
may have."""

from dataclasses import dataclass, field

from shmrl.errors import AlreadyFreed, NotOwner, StaleHandle

PAGE = 65536
CAPACITY = 16 * PAGE
CELLS = [2**k * quarters // 4 for k in range(8, 15) for quarters in range(4, 8)] + [1 << 15]
SHARES = {"x": 8 * PAGE, "y": 2 * PAGE}  # of run/x/..., run/y/...
GUARANTEED = {"": CAPACITY - sum(SHARES.values()), **SHARES}  # "": every other source
RESERVE = CAPACITY // 8


def span_of(total):
    """Bytes of the arena that a block takes with its tail: a cell, or whole pages."""
    return next((cell for cell in (0, *CELLS) if cell >= total), -(-total // PAGE) * PAGE)


def span_of_put(nbytes):
    """Of a block without columns: one with more than a page has a checksum for each."""
    return span_of(nbytes if nbytes <= PAGE else -(-nbytes // 8) * 8 + 16 + 4 * -(-nbytes // PAGE))


def share_of(tag):
    """The share that a block counts in."""
    source = tag.split("/")[1]
    return source if source in SHARES else ""


@dataclass
class Block:
    """One sealed block. owner: who may free it, None for an orphan. holders: how many views each player has. span: what
    it takes of the arena, 0 when it is in a file."""

    data: bytes
    tag: str
    owner: str | None
    checked: bool
    span: int
    rows: int | None = None  # of its column "rows", 10 bytes each
    retired: bool = False
    shipped: int = 0
    done: set[int] = field(default_factory=set)
    holders: dict[str, int] = field(default_factory=dict)

    def release(self, player):
        """One view less."""
        self.holders[player] -= 1
        if not self.holders[player]:
            del self.holders[player]

    def settle(self):
        """Retires the block once every reader is done."""
        if self.shipped and len(self.done) >= self.shipped:
            self.retired = True


@dataclass
class Unsealed:
    """One reserved block, of `rows` rows."""

    owner: str
    rows: int
    tag: str
    span: int
    discarded: bool = False


@dataclass
class Model:
    """Blocks by handle; those that are retired and held by nobody are gone. unsealed: by number."""

    blocks: dict[str, Block] = field(default_factory=dict)
    unsealed: dict[int, Unsealed] = field(default_factory=dict)
    created: int = 0

    def add(self, handle, block):
        assert handle not in self.blocks
        self.blocks[handle] = block
        self.created += 1

    def living(self):
        """Blocks that take space: not retired, or held by somebody."""
        return {h: b for h, b in self.blocks.items() if not b.retired or b.holders}

    def spans(self):
        """(tag, bytes of the arena) of each block that takes any."""
        return [(b.tag, b.span) for b in (*self.living().values(), *self.unsealed.values()) if b.span]

    def used(self):
        """Bytes by share."""
        out = dict.fromkeys(GUARANTEED, 0)
        for tag, span in self.spans():
            out[share_of(tag)] += span
        return out

    def admits(self, tag, span):
        """Whether the shares let a source have so much more. Room for it is another matter: see fits()."""
        used, mine = self.used(), share_of(tag)
        if used[mine] + span <= GUARANTEED[mine]:
            return True
        unused = sum(max(0, GUARANTEED[other] - used[other]) for other in GUARANTEED if other != mine)
        return sum(used.values()) + span + min(unused, RESERVE) <= CAPACITY

    def fits(self, span):
        """Whether there is room wherever the blocks are: a page, if each block in a cell has one of its own."""
        return span <= PAGE and sum(-(-each // PAGE) for _, each in self.spans()) < CAPACITY // PAGE

    def readable(self, handle):
        """The error of get() and adopt(), or None."""
        return StaleHandle if self.blocks[handle].retired else None

    def freeable(self, handle, player):
        """The error of free(), or None."""
        block = self.blocks[handle]
        if block.retired:
            return AlreadyFreed
        return None if block.owner == player else NotOwner

    def shippable(self, handle, player):
        """The error of ship(), or None."""
        return StaleHandle if self.blocks[handle].retired else None if self.blocks[handle].owner == player else NotOwner

    def ship(self, handle, readers):
        block = self.blocks[handle]
        block.shipped, block.done = readers, set()

    def done(self, handle, reader):
        """The error of done(), or None."""
        block = self.blocks[handle]
        if block.retired:
            return None
        if not block.shipped:
            return ValueError
        block.done.add(reader)
        block.settle()
        return None

    def discard(self, prefix):
        """How many blocks discard() retires."""
        sealed = [b for b in self.blocks.values() if not b.retired and f"{b.tag}/".startswith(f"{prefix}/")]
        unsealed = [b for b in self.unsealed.values() if not b.discarded and f"{b.tag}/".startswith(f"{prefix}/")]
        for block in sealed:
            block.retired = True
        for block in unsealed:
            block.discarded = True
        return len(sealed) + len(unsealed)

    def leave(self, player):
        """A player closes or dies: its views end, what it owned is orphaned."""
        for block in self.blocks.values():
            block.holders.pop(player, None)
            if block.owner == player:
                block.owner = None
        self.unsealed = {number: block for number, block in self.unsealed.items() if block.owner != player}
