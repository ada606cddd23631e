"""The arena's model: a dict of what every block must be, and the errors that every verb must then raise."""

from dataclasses import dataclass, field

from shmrl.errors import AlreadyFreed, NotOwner, StaleHandle


@dataclass
class Block:
    """One sealed block. owner: who may free it, None for an orphan. holders: how many views each player has."""

    data: bytes
    tag: str
    owner: str | None
    checked: bool
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
class Model:
    """Blocks by handle; those that are retired and held by nobody are gone."""

    blocks: dict[str, Block] = field(default_factory=dict)
    created: int = 0

    def add(self, handle, block):
        assert handle not in self.blocks
        self.blocks[handle] = block
        self.created += 1

    def living(self):
        """Blocks that take space: not retired, or held by somebody."""
        return {h: b for h, b in self.blocks.items() if not b.retired or b.holders}

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
        found = [b for b in self.blocks.values() if not b.retired and (b.tag + "/").startswith(prefix + "/")]
        for block in found:
            block.retired = True
        return len(found)

    def leave(self, player):
        """A player closes or dies: its views end, what it owned is orphaned."""
        for block in self.blocks.values():
            block.holders.pop(player, None)
            if block.owner == player:
                block.owner = None
