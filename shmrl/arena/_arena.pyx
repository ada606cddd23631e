# cython: binding=False, embedsignature=True, embedsignature.format=clinic
"""The binding: views, blocks and the hot half of `Arena`, over the C core. Runs in every attached process.

Two rules of lifecycle. A `View` or an open `Block` keeps its `Core` mapped: `close()` forbids new work at once and
unmaps with the last of them. And everything that touches the private hold counts runs under the interpreter's lock;
only copies, checksums, waits and sweeps release it. Cold paths (files, growth, messages) are in arena.py, which
subclasses `Core`.

Views and blocks are in one extension with `Core`: they call each other for every block, and a second one would have the
C core's own state twice, the list of attachments that a fork closes (arena_live.c) above all.

Methods are plain method descriptors (binding=False): under the limited API a call of Cython's own function type builds
two tuples, and `get` is called per block and step.
"""

cimport cython
from shmrl.arena.core cimport *
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_FillInfo, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytearray cimport PyByteArray_AsString
from cpython.bytes cimport PyBytes_AsString, PyBytes_Check, PyBytes_FromStringAndSize, PyBytes_Size
from cpython.exc cimport PyErr_CheckSignals
from cpython.number cimport PyNumber_Index
from cpython.object cimport PyObject, PyTypeObject
from cpython.unicode cimport PyUnicode_AsUTF8AndSize
from libc.errno cimport EAGAIN, EBUSY, ENOENT, ENOSPC, ENXIO, EPERM, ESTALE, ETIMEDOUT
from libc.math cimport INFINITY
from libc.stdint cimport uintptr_t
from libc.string cimport memchr, memcpy, memset
from posix.mman cimport MAP_ANONYMOUS, MAP_FAILED, MAP_FIXED, MAP_NORESERVE, MAP_PRIVATE, MAP_SHARED
from posix.mman cimport PROT_NONE, PROT_READ, PROT_WRITE, mmap, munmap
from posix.time cimport CLOCK_MONOTONIC
from posix.unistd cimport close as close_fd, getpid

import warnings
from os import strerror
from time import sleep

from shmrl.arena._dlpack import UNSAID, capsule
from shmrl.errors import (
    AlreadyFreed, ArenaClosed, ArenaCorrupt, ArenaError, ForeignArena, NotOwner, NotSealed, PeerStalled,
    StaleHandle, TooManyProcesses, ViewsAlive,
)
from shmrl.types import HANDLE_VERSION, Handle

cdef extern from "Python.h":
    enum: Py_tp_new
    ctypedef object (*newfunc)(PyTypeObject *kind, tuple arguments, PyObject *keywords)
    void *PyType_GetSlot(PyTypeObject *kind, int slot)
    void PyObject_GC_UnTrack(PyObject *one)

cdef extern from "errno.h":
    enum: ECANCELED, EMLINK, ENODATA, EUCLEAN, EUSERS, EXFULL

cdef extern from "sys/mman.h" nogil:
    enum: MADV_DONTDUMP
    int madvise(void *address, size_t nbytes, int advice)

cdef extern from "fcntl.h" nogil:
    int posix_fallocate(int fd, int64_t offset, int64_t length)

cdef uint64_t RELEASE_GIL_FROM = 65536  # bytes: shorter copies are over before another thread could start
cdef uint64_t LOCK_NS = 5_000_000_000  # how long cold operations wait for the allocator's lock
cdef uint64_t HUGE_PAGE = 2 << 20
cdef double LONGEST_S = 1e9  # of a wait: thirty years are for ever
cdef uint64_t LOOK_AHEAD = 64 << 20  # bytes: with less free, the next step is committed in the background
cdef uint8_t VERSION = HANDLE_VERSION
cdef PyTypeObject *HANDLE = <PyTypeObject *> Handle  # a global of this module is looked up by name at every use
cdef newfunc new_bytes = <newfunc> PyType_GetSlot(<PyTypeObject *> bytes, Py_tp_new)


cdef struct Parts:
    uint32_t slot
    uint32_t generation
    uint64_t nonce


cdef set HERE = set()  # (arena's number, process slot, pid) of our attachments: pids are unique in a namespace only

ctypedef int (*verb_fn)(srl_arena *a, uint32_t slot, uint32_t generation, uint64_t nonce) noexcept nogil


ERRORS = {
    -ESTALE: (StaleHandle, "was freed, or its slot belongs to another generation"),
    -EBUSY: (NotSealed, "is still being written"),
    -EPERM: (NotOwner, "belongs to another attachment; adopt it first"),
    -ECANCELED: (AlreadyFreed, "was discarded before it was sealed"),
    -ENODATA: (ValueError, "was never shipped"),
    -EUCLEAN: (ArenaCorrupt, "the arena's control words contradict each other"),
    -EUSERS: (TooManyProcesses, "every process slot of the arena is taken by a live process"),
    -EAGAIN: (ArenaError, "no random bytes from the kernel"),
}


cdef int check(int rc, object what, str more="") except -1:
    """The one place where a C code becomes an exception; `what` is the handle or the operation, `more` what is known
    beyond the code."""
    if rc >= 0:
        return 0
    kind, text = ERRORS.get(rc, (ArenaError, f"error {-rc}"))
    text = more or text
    name = repr(Handle(what)) if isinstance(what, bytes) else what  # raw bytes serve as a handle; people read its parts
    raise kind(f"{name} {text}")


cdef inline double seconds_of(object timeout_s) except? -1:
    """None is for ever. ValueError for NaN, which is before no deadline."""
    cdef double seconds = INFINITY if timeout_s is None else timeout_s
    if seconds != seconds:
        raise ValueError("timeout_s=nan: seconds, or None for ever")
    return seconds


cdef inline uint64_t deadline_of(double timeout_s):
    return srl_now_ns(CLOCK_MONOTONIC) + <uint64_t> (max(0.0, min(timeout_s, LONGEST_S)) * 1e9)


cdef uint8_t *map_aligned(int fd, uint64_t nbytes):
    """Maps a file read-only at a multiple of HUGE_PAGE, without which huge pages are mapped as small ones; or NULL."""
    cdef uint8_t *room = <uint8_t *> mmap(
        NULL, nbytes + HUGE_PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)
    if room == <uint8_t *> MAP_FAILED:
        return NULL
    cdef uint64_t before = -<uint64_t> room % HUGE_PAGE
    cdef uint8_t *at = <uint8_t *> mmap(room + before, nbytes, PROT_READ, MAP_SHARED | MAP_FIXED, fd, 0)
    if at == <uint8_t *> MAP_FAILED:
        munmap(room, nbytes + HUGE_PAGE)
        return NULL
    if before:
        munmap(room, before)
    munmap(at + nbytes, HUGE_PAGE - before)
    return at


cdef uint32_t fill(uint8_t *to, const void *source, uint64_t n, bint hot, bint checksum, uint32_t *crc) noexcept:
    """Copies from source, if there is one, and writes the checksums behind the payload -> bytes of tail."""
    cdef uint32_t tail
    if n < RELEASE_GIL_FROM:
        return srl_fill(to, source, n, hot, checksum, crc)
    with nogil:
        tail = srl_fill(to, source, n, hot, checksum, crc)
    return tail


cdef str ended(unsigned kind):
    return "discarded" if kind == SRL_DID_DISCARD else "freed as an orphan" if kind == SRL_DID_EXPIRE else "freed"


cdef uint64_t column_tail(uint64_t nbytes):
    """Room for any 24 columns: their table, a checksum per 512 bytes (512 rows of one byte), one more per column."""
    return 8 + 16 + 24 * (64 + 4) + 4 * ((nbytes + 511) // 512)


def span_bytes(nbytes):
    """What a reserve() of `nbytes` takes from the arena: with room for its tail, in whole pages or a cell."""
    return srl_span_nbytes(nbytes + column_tail(nbytes))


@cython.no_gc_clear
cdef class View:
    """Read-only flat bytes of one block, or of one field's rows: the mapping itself; `np.frombuffer` copies nothing.

    Dropping it releases it. `release()` does so at once, or raises ViewsAlive while arrays made from it live; leaving a
    `with` block then defers to the last of them. Cannot be pickled: send `handle` instead.
    """
    cdef Core core            # keeps the mapping
    cdef readonly object handle
    cdef uint32_t slot        # descriptor whose hold this view has
    cdef const uint8_t *file  # a spilled block's own mapping
    cdef uint64_t mapped      # its bytes, 0 = none: the block is in the arena's
    cdef const uint8_t *at    # first byte of the view
    cdef Py_ssize_t n, row    # bytes, and bytes in a row: 1 for a whole block
    cdef int exports          # live buffers
    cdef bint held, leaving   # holds the block; release with the last export

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        if not self.held:
            raise BufferError("the view was released")
        PyBuffer_FillInfo(buffer, self, <void *> self.at, self.n, 1, flags)
        self.exports += 1

    def __releasebuffer__(self, Py_buffer *buffer):
        self.exports -= 1
        if self.leaving and not self.exports:
            self._drop()

    cdef void _drop(self) noexcept:
        if self.held:
            self.held = False
            if self.mapped:
                munmap(<void *> self.file, self.mapped)
            self.core._let_go(self.slot)

    @property
    def nbytes(self):
        """Bytes in the view."""
        return self.n

    @property
    def row_nbytes(self):
        """Bytes in a row of the field, 1 for a whole block."""
        return self.row

    @property
    def rows(self):
        """Rows in the view: `np.frombuffer(view, dtype).reshape(view.rows, -1)`."""
        return self.n // self.row

    def __len__(self):
        return self.n

    def release(self):
        """Lets go of the block; a second call does nothing. ViewsAlive while arrays made from the view live."""
        if self.exports:
            raise ViewsAlive(f"{self.exports} buffers made from the view of {self.handle!r} are alive")
        self._drop()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        if self.exports:
            self.leaving = True
        else:
            self._drop()

    @property
    def __array_interface__(self):
        """NumPy's protocol, version 3; data is a memoryview, since of any other object NumPy keeps no buffer."""
        return dict(version=3, shape=(self.n,), typestr="|u1", data=memoryview(self))

    def __dlpack_device__(self):
        """(1, 0): memory of the host."""
        return 1, 0

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=UNSAID):
        """The array API standard's capsule, uint8 [nbytes], read-only; see `_dlpack.capsule` for who gets a copy."""
        return capsule(self, stream, max_version, dl_device, copy)

    def _cut(self, Py_ssize_t start, Py_ssize_t rows, Py_ssize_t row_nbytes):
        """Narrows a fresh view to rows from byte `start` on, as the columns table has them."""
        if start < 0 or rows < 0 or row_nbytes < 1 or start > self.n or rows > (self.n - start) // row_nbytes:
            raise ArenaCorrupt(f"{self.handle!r}: {rows} rows of {row_nbytes} bytes at {start} of {self.n}")
        self.at += start
        self.n, self.row = rows * row_nbytes, row_nbytes

    def _tail(self):
        """What lies behind the payload -> (tail bytes, its crc32c in the descriptor, sealed with checksums)."""
        cdef srl_block *b = self.core.a.blocks + self.slot
        cdef uint64_t left = self.mapped
        if not left:
            left = self.core.data_nbytes - <uint64_t> (self.at - self.core.data)
        cdef uint64_t start = srl_tail_at(self.n), n = b.tail_nbytes
        if n and (start > left or n > left - start):
            raise ArenaCorrupt(f"{self.handle!r}: a tail of {n} bytes behind {self.n}, with {left} to the end")
        tail = PyBytes_FromStringAndSize(<const char *> self.at + start, n) if n else b""
        return tail, b.crc, not (b.word >> 16) & SRL_UNCHECKED

    def _place(self):
        """(whether it is in a file of its own, where it begins there or in the arena's data), for sendfile."""
        if self.mapped:
            return True, <uintptr_t> self.at - <uintptr_t> self.file
        return False, <uintptr_t> self.at - <uintptr_t> self.core.data

    def __reduce__(self):
        raise TypeError("a view is memory of this process; send its handle")

    def __dealloc__(self):
        self._drop()


@cython.no_gc_clear
cdef class Block:
    """A reserved block: fill `buffer`, then `seal()`. Leaving `with` unsealed frees it. Made by `Arena.reserve`."""
    cdef Core core
    cdef uint32_t slot, generation
    cdef uint64_t nonce, n, room
    cdef uint8_t *at              # first byte: in the arena's mapping, or in a spilled block's own
    cdef uint64_t mapped          # bytes of that mapping of its own, 0 = none
    cdef int exports              # live buffers: their bytes cannot go back to the pool
    cdef bint reserving           # nothing is reserved yet, but the mapping is kept
    cdef bint open, abandoned, held
    cdef readonly object handle   # None until sealed
    cdef readonly str tag

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        if not self.open:
            raise BufferError("the block is sealed or freed")
        PyBuffer_FillInfo(buffer, self, self.at, <Py_ssize_t> self.n, 0, flags)
        self.exports += 1

    def __releasebuffer__(self, Py_buffer *buffer):
        self.exports -= 1
        if self.exports or self.open:
            return
        if self.abandoned:
            self._free()
        elif self.held:
            self.held = False
            self._unmap()
            self.core._let_go(self.slot)

    cdef void _unmap(self):
        if self.mapped:
            munmap(self.at, self.mapped)
            self.mapped = 0

    @property
    def buffer(self):
        """Writable memoryview of the payload, uint8 [nbytes]. Not for use after seal()."""
        return memoryview(self)

    @property
    def nbytes(self):
        """Payload bytes."""
        return self.n

    def seal(self, checksum=True, columns=None, taken=None):
        """Publishes the block -> Handle. `columns`: (field, offset, row_nbytes, rows) of each, in bytes of the payload.

        Example: seal(columns=[("routing", 0, 384, 36)]) for 36 rows of 384 bytes each, the first at byte 0.

        taken: {field: uint32s} of checksums that the writer has taken itself, one per `columns.rows_per_crc` rows.

        checksum=False is O(1) and marks the block as unchecked. Errors: AlreadyFreed if its tag was discarded
        meanwhile, ValueError for columns that overlap or leave the payload, or a second seal.
        """
        if not self.open:
            raise ValueError("the block was sealed or freed already")
        self.core._alive()
        cdef uint32_t crc = 0, tail = 0
        if columns is not None:
            tail = self._append(self.core._make_tail(self, columns, checksum, taken), &crc)
        elif checksum:
            tail = fill(self.at, NULL, self.n, False, True, &crc)
        return self._publish(tail, crc, checksum)

    def _seal_as(self, bytes tail, uint32_t crc, bint checked):
        """Publishes a copy of another block -> Handle: what lies behind that one, and the crc in its descriptor."""
        if not self.open:
            raise ValueError("the block was sealed or freed already")
        self.core._alive()
        cdef uint32_t n = self._append(tail, &crc) if tail else 0
        return self._publish(n, crc, checked)

    cdef uint32_t _append(self, bytes tail, uint32_t *crc) except? 0:
        cdef Py_ssize_t n = len(tail)
        if srl_tail_at(self.n) - self.n + <uint64_t> n > self.room:
            raise ValueError(f"columns and checksums of {n} bytes do not fit the {self.room} behind the payload: "
                             "24 columns, and a checksum per 512 bytes")
        memcpy(self.at + srl_tail_at(self.n), PyBytes_AsString(tail), n)
        crc[0] = srl_crc32c(0, PyBytes_AsString(tail), n)
        return <uint32_t> n

    cdef object _publish(self, uint32_t tail, uint32_t crc, bint checked):
        cdef bint hold = self.exports != 0  # a writable array is still about: its bytes may not become another block's
        cdef int rc = srl_seal(&self.core.a, self.slot, self.generation, tail, crc, checked, hold)
        if rc:
            self.free()
            self.core._unsealable(rc, self.slot, self.generation, self.tag)
        self.open, self.held = False, hold
        self.handle = self.core._handle(self.slot, self.generation, self.nonce, self.n)
        if not hold:
            self._unmap()
            self.core._leave()
        return self.handle

    def free(self):
        """Gives the unsealed block back; after seal() it does nothing. Bytes return with the last live buffer."""
        if not self.open:
            return
        self.open = False
        if self.exports:
            self.abandoned = True
        else:
            self._free()

    cdef void _free(self) noexcept:
        self.abandoned = False
        self._unmap()
        if not self.core.live.detached:
            srl_abort(&self.core.a, self.slot, self.generation)
        self.core._leave()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.free()

    def __dealloc__(self):
        if self.reserving:
            self.core._leave()
        if self.open:
            self.open = False
            self._free()
            warnings.warn(f"a reserved block of {self.n} bytes, tag {self.tag!r}, was dropped unsealed",
                          ResourceWarning)


@cython.no_gc_clear
cdef class Window:
    """One of the arena's mappings as read-only bytes; it stays mapped while buffers of this are exported."""
    cdef Core core
    cdef uint8_t *at
    cdef uint64_t n

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        self.core._alive()
        PyBuffer_FillInfo(buffer, self, self.at, <Py_ssize_t> self.n, 1, flags)
        self.core.users += 1

    def __releasebuffer__(self, Py_buffer *buffer):
        self.core._leave()


cdef class Core:
    """An attached arena. Everything hot; `shmrl.arena.Arena` adds files, growth, statistics and messages."""
    cdef srl_arena a
    cdef srl_live live
    cdef uint8_t *ctl
    cdef uint8_t *data           # one mapping of the whole capacity, read-only until the first reserve
    cdef uint64_t data_nbytes, ctl_nbytes, holds_nbytes
    cdef int ctl_fd, data_fd
    cdef Py_ssize_t users        # views, blocks and calls without the GIL that need the mappings
    cdef uint32_t node, number   # what every handle of this arena carries
    cdef bytearray raw           # the next handle's bytes
    cdef tuple made_of           # (raw,)
    cdef uint32_t reader_index
    cdef bint attached, shut, writable
    cdef Py_ssize_t within       # threads that wait for what their source's share covers

    def __cinit__(self):
        self.live.fd = self.live.spill = self.ctl_fd = self.data_fd = -1
        self.raw = bytearray(32)
        self.made_of = (self.raw,)

    def _attach(self, int live_fd, int ctl_fd, int data_fd, int spill_fd, uint64_t ctl_nbytes,
                uint64_t data_file_nbytes, bytes name, reader):
        """Maps ctl and data, claims a process slot. Owns the descriptors from here on, also when it raises."""
        self.ctl_fd, self.data_fd, self.ctl_nbytes = ctl_fd, data_fd, ctl_nbytes
        srl_live_init(&self.live, live_fd, spill_fd)
        self.ctl = <uint8_t *> mmap(NULL, ctl_nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, ctl_fd, 0)
        if self.ctl == <uint8_t *> MAP_FAILED:
            self.ctl = NULL
            raise ArenaError(f"cannot map {ctl_nbytes} bytes of control words (RLIMIT_AS?)")
        open_ctl(&self.a, self.ctl, ctl_nbytes)
        self.holds_nbytes = self.a.max_blocks * sizeof(srl_hold)
        self.a.holds = <srl_hold *> mmap(
            NULL, self.holds_nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)
        self.data_nbytes = <uint64_t> self.a.max_pages * SRL_PAGE
        if data_file_nbytes < self.data_nbytes:
            raise ArenaCorrupt(f"a data file of {data_file_nbytes} bytes, for a capacity of {self.data_nbytes}")
        self.data = map_aligned(data_fd, self.data_nbytes)
        if self.data == NULL or self.a.holds == <srl_hold *> MAP_FAILED:
            raise ArenaError(f"cannot map {self.data_nbytes} bytes of data (RLIMIT_AS?)")
        madvise(self.data, self.data_nbytes, MADV_DONTDUMP)  # a core dump would keep our byte locked meanwhile
        for _attempt in range(50):  # a slot that is being swept or claimed right now may be free in a moment
            rc = srl_claim(&self.a, &self.live)
            if rc != -EUSERS:
                break
            sleep(0.002)
        check(rc, "attach:")
        self.attached = True
        srl_live_watch_forks(&self.live)
        self.node = self.a.h.node
        memcpy(&self.number, self.a.h.id, 4)
        self.reader_index = self.a.self if reader is None else reader
        self._describe(name)
        HERE.add((self.number, self.a.self, getpid()))

    cdef void _describe(self, bytes name):
        cdef srl_process *me = self.a.processes + self.a.self
        cdef Py_ssize_t n = min(len(name), <Py_ssize_t> sizeof(me.name) - 1)
        memset(me.name, 0, sizeof(me.name))
        memcpy(me.name, PyBytes_AsString(name), n)
        me.pid = getpid()
        me.since_ns = srl_now_ns(7)  # CLOCK_BOOTTIME

    def _make_writable(self, int fd):
        """Replaces the read-only mapping in place, so that live views stay valid; owns `fd`."""
        cdef void *at = mmap(self.data, self.data_nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0)
        if at == MAP_FAILED:
            close_fd(fd)
            raise ArenaError(f"cannot map {self.data_nbytes} bytes of data for writing")
        madvise(self.data, self.data_nbytes, MADV_DONTDUMP)
        close_fd(self.data_fd)
        self.data_fd = fd
        self.writable = True

    # ------------------------------------------------------------------------------------------------------ lifecycle

    cdef int _alive(self) except -1:
        if self.shut or self.live.detached or not self.attached:
            raise ArenaClosed("this process is a fork of the one that attached; attach again" if self.live.detached
                              else "the arena was closed")
        return 0

    cdef void _leave(self) noexcept:
        self.users -= 1
        if self.shut and not self.users:
            self._tear_down()

    cdef void _let_go(self, uint32_t slot) noexcept:
        """A hold ends. In a forked child the hold is the parent's, and is left alone."""
        if not self.live.detached:
            srl_release(&self.a, slot)
        self._leave()

    cdef void _tear_down(self) noexcept:
        if self.attached:
            self.attached = False
            if not self.live.detached:
                HERE.discard((self.number, self.a.self, getpid()))
                srl_live_unwatch(&self.live)
                srl_sweep(&self.a, self.a.self)  # a clean close is the sweep of oneself, with the byte still locked
        if self.data != NULL:
            munmap(self.data, self.data_nbytes)
        if self.a.holds != NULL:
            munmap(self.a.holds, self.holds_nbytes)
        if self.ctl != NULL:
            munmap(self.ctl, self.ctl_nbytes)
        self.data, self.a.holds, self.ctl = NULL, NULL, NULL
        for fd in (self.data_fd, self.ctl_fd, self.live.spill, self.live.fd):
            if fd >= 0:
                close_fd(fd)
        self.data_fd = self.ctl_fd = self.live.spill = self.live.fd = -1

    def close(self):
        """Detaches this process: its unsealed blocks are freed, its sealed ones become orphans. Idempotent.

        With live views the memory stays mapped, and held, until the last of them is gone.
        """
        if self.shut:
            return
        self.shut = True
        if not self.users:
            self._tear_down()

    @property
    def closed(self):
        """True after close(), and in a forked child."""
        return self.shut or bool(self.live.detached)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()

    def __dealloc__(self):
        if self.attached and not self.shut and not self.live.detached:
            self._tear_down()
            warnings.warn("an attached arena was dropped without close()", ResourceWarning)
        else:
            self._tear_down()

    # -------------------------------------------------------------------------------------------------------- handles

    cdef object _handle(self, uint32_t slot, uint32_t generation, uint64_t nonce, uint64_t nbytes):
        """Handle(raw), without a call into Python, nor one of the `__bytes__` that raw bytes would have.

        A handle refers to nothing, so the collector need not go through the thousands of a step.
        """
        cdef char *raw = PyByteArray_AsString(self.raw)
        raw[0], raw[1] = VERSION, 0
        memcpy(raw + 2, &self.node, 4)
        memcpy(raw + 6, &self.number, 4)
        memcpy(raw + 10, &slot, 4)
        memcpy(raw + 14, &generation, 4)
        memcpy(raw + 18, &nbytes, 6)
        memcpy(raw + 24, &nonce, 8)
        handle = new_bytes(HANDLE, self.made_of, NULL)
        PyObject_GC_UnTrack(<PyObject *> handle)
        return handle

    cdef int _parts(self, object handle, Parts *out) except -1:
        """Slot, generation and nonce of a handle of this arena. TypeError, ForeignArena."""
        self._alive()
        if not PyBytes_Check(handle) or PyBytes_Size(handle) != 32:
            raise TypeError(f"expected a Handle, got {type(handle).__name__}")
        cdef const uint8_t *raw = <const uint8_t *> PyBytes_AsString(handle)
        cdef uint32_t node, number
        memcpy(&node, raw + 2, 4)
        memcpy(&number, raw + 6, 4)
        if raw[0] != VERSION or node != self.node or number != self.number:
            raise ForeignArena(f"handle of version {raw[0]}, node {node:08x}, arena {number:08x}; "
                               f"this is node {self.node:08x}, arena {self.number:08x}")
        memcpy(&out.slot, raw + 10, 4)
        memcpy(&out.generation, raw + 14, 4)
        memcpy(&out.nonce, raw + 24, 8)
        return 0

    @property
    def origin(self):
        """What `Handle.origin` says of every block of this arena."""
        return self._handle(0, 0, 0, 0).origin

    def _is_freed(self, handle):
        """Whether the handle's block is known to be no more; False also for one that never was. ForeignArena."""
        cdef Parts p
        self._parts(handle, &p)
        if p.slot >= srl_table_used(&self.a):
            return False
        cdef uint64_t word = self.a.blocks[p.slot].word
        cdef uint32_t now = <uint32_t> (word >> 32)
        return now > p.generation or (now == p.generation and (word >> 28 & 15) >= SRL_RETIRED)

    def _mine(self, handle):
        """The handle as one of this arena. TypeError, ForeignArena."""
        cdef Parts p
        self._parts(handle, &p)
        return Handle(handle)

    # -------------------------------------------------------------------------------------------------------- writing

    def reserve(self, nbytes, str tag not None="", timeout_s=30.0, on_full="block", hot=False):
        """A block of `nbytes` to fill in place -> Block (use it with `with`; leaving without seal() frees it).

        tag: "run/source/group/episode", at most 112 bytes. on_full: "block" waits up to timeout_s (None = for ever) for
        space, "raise" does not, "spill" waits as "block" does and then takes a file of the spill directory. A block
        larger than the arena waits for nothing: it is refused, or spilled, at once. `hot` matters to put() alone; it is
        accepted so that both take the same arguments. Errors: ArenaFull, PeerDied, PeerStalled, ArenaClosed, ValueError
        ("spill" without a spill_dir).
        """
        nbytes = PyNumber_Index(nbytes)
        if not 0 <= nbytes < 1 << 48:
            raise ValueError(f"nbytes={nbytes}: a block has 0 to 2^48 - 1 bytes")
        cdef srl_request r
        self.users += 1
        try:
            seconds = self._ask(&r, nbytes, column_tail(nbytes), tag, timeout_s, on_full)
            return self._reserve(&r, tag, seconds, on_full)
        finally:
            self._leave()

    cdef double _ask(self, srl_request *r, uint64_t nbytes, uint64_t room, str tag, object timeout_s,
                     str on_full) except? -1:
        """Makes a request of what reserve() was given -> seconds of patience. The arena can be written to then."""
        self._alive()
        if on_full not in ("block", "raise") and (on_full != "spill" or self.live.spill < 0):
            raise ValueError(f"on_full={on_full!r}: 'block' or 'raise'"
                             + (" (this arena has no spill_dir)" if self.live.spill < 0 else " or 'spill'"))
        cdef Py_ssize_t tag_len
        cdef const char *raw = PyUnicode_AsUTF8AndSize(tag, &tag_len)
        if tag_len > SRL_TAG_MAX or memchr(raw, 0, tag_len) != NULL:
            raise ValueError(f"tag of {tag_len} bytes: at most {SRL_TAG_MAX}, no NUL")
        cdef double seconds = seconds_of(timeout_s)
        if not self.writable:
            self._open_for_writing()
            self._alive()
        r.nbytes, r.room, r.tag, r.tag_len, r.spill = nbytes, room, raw, <uint32_t> tag_len, False
        return seconds

    cdef bint _is_short(self, uint64_t more) noexcept:
        """Whether less than a step is left of what is committed, with `more` bytes in use, and more can be."""
        return (self.a.h.committed_pages < self.a.max_pages
                and self.a.h.committed_pages * SRL_PAGE < self.a.h.used_bytes + more + LOOK_AHEAD)

    cdef Block _reserve(self, srl_request *r, str tag, double seconds, str on_full):
        cdef Block block = Block.__new__(Block)
        self.users += 1  # the block's
        block.core, block.reserving = self, True
        cdef int rc = srl_reserve(&self.a, r, 0)
        cdef uint64_t began = 0
        if rc:
            began = srl_now_ns(CLOCK_MONOTONIC)
            self._reserve_slowly(r, seconds, on_full)
        block.slot, block.generation, block.nonce = r.slot, r.generation, r.nonce
        block.n, block.room, block.open, block.reserving, block.tag = r.nbytes, r.room, True, False, tag
        if r.spill:
            self._make_file(block, max(r.offset, <uint64_t> 1), began)
        else:
            block.at = self.data + r.offset
        if self.shut:
            block.free()
            raise ArenaClosed("the arena was closed meanwhile")
        if self._is_short(0):
            self._look_ahead()
        return block

    cdef int _reserve_slowly(self, srl_request *r, double timeout_s, str on_full) except -1:
        cdef uint64_t began = srl_now_ns(CLOCK_MONOTONIC)
        cdef uint64_t deadline = deadline_of(timeout_s), patience
        cdef int rc
        cdef str tag = r.tag[:r.tag_len].decode()
        cdef uint64_t most = srl_share_limit(&self.a, srl_share_of(&self.a, r.tag, r.tag_len))
        turn = self._waiting(r.nbytes, r.nbytes + r.room, tag, on_full, timeout_s, most)
        try:
            while True:
                turn.seen = self.a.h.space_seq
                patience = max(deadline, srl_now_ns(CLOCK_MONOTONIC) + 250_000_000)  # for the lock, however short
                with nogil:
                    rc = srl_reserve(&self.a, r, patience)
                if rc == 0:
                    return 0
                if rc == -ETIMEDOUT:
                    self._raise_stalled((srl_now_ns(CLOCK_MONOTONIC) - began) / 1e9)
                if rc not in (-ENOSPC, -EXFULL, -EMLINK):
                    check(rc, "reserve:")
                if turn.next(-rc, r.borrows):
                    r.spill = True
        finally:
            turn.leave()

    cdef int _make_file(self, Block block, uint64_t nbytes, uint64_t began) except -1:
        """The file of a block reserved as spilled, since `began`; if it cannot be had, the block is no more."""
        cdef int rc, directory = self.live.spill
        cdef uint32_t slot = block.slot, generation = block.generation
        cdef uint8_t *at = NULL
        with nogil:
            rc = srl_spill_make(directory, slot, generation, nbytes, &at)
        if rc:
            block.open = False
            block._free()
            raise self._spill_failed(block.n, -rc, (srl_now_ns(CLOCK_MONOTONIC) - began) / 1e9)
        block.at, block.mapped = at, nbytes
        return 0

    def _queue(self, bint enter):
        """Takes this process's place in the queue for space, or gives it up."""
        if enter:
            srl_queue_enter(&self.a, not self.within)
        else:
            srl_queue_leave(&self.a)

    def _queue_class(self, bint was, bint now):
        """Whether a waiting thread was, and now is, within its share; their one place is that of the best."""
        self.within += <int> now - <int> was
        srl_queue_class(&self.a, not self.within)

    def _others_wait(self):
        """(other processes that wait for space and look at it, seconds since the first of them began)."""
        self._alive()
        cdef uint64_t since
        cdef uint32_t n = srl_queue_others(&self.a, &since)
        return n, max(0, <int64_t> (srl_now_ns(CLOCK_MONOTONIC) - since)) / 1e9 if n else 0.0

    def _share(self, str tag):
        """(index, bytes that others have kept for them) of the share a tag belongs to; None without shares."""
        self._alive()
        cdef Py_ssize_t n
        cdef const char *raw = PyUnicode_AsUTF8AndSize(tag, &n)
        if not self.a.shares:
            return None
        index = srl_share_of(&self.a, raw, <uint32_t> n)
        return index, srl_share_kept(&self.a, index)

    def _is_dead(self, uint32_t process):
        """Whether the kernel says so; never of this process."""
        self._alive()
        return process != self.a.self and srl_live_is_dead(&self.live, process) != 0

    def _note_full(self, uint64_t nbytes):
        """Leaves an event: there was no room for nbytes."""
        srl_event_note(&self.a, SRL_DID_FILL, 0, 0, nbytes)

    def _space_wait(self, uint32_t seen, uint64_t timeout_ns):
        """Sleeps until space came back since `seen` was read, at most timeout_ns."""
        with nogil:
            srl_space_wait(&self.a, seen, timeout_ns)
        PyErr_CheckSignals()

    cdef int _raise_stalled(self, double held_s) except -1:
        owner = srl_lock_owner(&self.a)
        if owner >= self.a.max_processes or owner == self.a.self:
            raise PeerStalled("a thread of this process", getpid(), held_s)
        cdef srl_process *p = self.a.processes + <uint32_t> owner
        raise PeerStalled(text_of(p.name, sizeof(p.name)), p.pid, held_s, self._is_stopped(p.pid))

    def put(self, data, str tag not None="", on_full="block", timeout_s=30.0, hot=False, checksum=True):
        """Copies any C-contiguous buffer or array in -> Handle. reserve()'s arguments; shape and dtype are not kept.

        Copies of 256 KiB and more bypass the caches unless `hot` says that the reader is next.
        """
        cdef Py_buffer source
        PyObject_GetBuffer(data, &source, PyBUF_SIMPLE)
        self.users += 1  # a close() meanwhile, by another thread or a signal handler, leaves the mapping
        try:
            return self._put(&source, tag, timeout_s, on_full, hot, checksum)
        finally:
            self._leave()
            PyBuffer_Release(&source)

    cdef object _put(self, Py_buffer *source, str tag, object timeout_s, str on_full, bint hot, bint checksum):
        """Where there is room at once no Block is made: between reserve and seal nothing can raise."""
        cdef srl_request r
        cdef uint32_t tail, crc = 0
        cdef uint64_t n = <uint64_t> source.len, room = srl_plain_tail(n)
        cdef double seconds = self._ask(&r, n, room, tag, timeout_s, on_full)
        cdef Block block
        if self._is_short(n) or srl_reserve(&self.a, &r, 0):
            block = self._reserve(&r, tag, seconds, on_full)
            tail = fill(block.at, source.buf, n, hot, checksum, &crc)
            return block._publish(tail, crc, checksum)
        tail = fill(self.data + r.offset, source.buf, n, hot, checksum, &crc)
        cdef int rc = srl_seal(&self.a, r.slot, r.generation, tail, crc, checked=checksum, held=False)
        if rc:
            srl_abort(&self.a, r.slot, r.generation)
            self._unsealable(rc, r.slot, r.generation, tag)
        return self._handle(r.slot, r.generation, r.nonce, n)

    # -------------------------------------------------------------------------------------------------------- reading

    def get(self, handle, verify=False, field=None, rows=None):
        """The block's payload, or rows [a, b) of one of its columns -> View, uint8 [nbytes], read-only, zero-copy.

        verify=True compares the crc32c of what the view covers (whole row blocks) first. Errors: StaleHandle,
        NotSealed, ForeignArena, ChecksumError, KeyError (no such field), ValueError (rows without field, or out of
        range).
        """
        cdef View view = self._view(handle)
        if verify or field is not None or rows is not None:
            self._narrow(view, verify, field, rows)
        return view

    def get_many(self, handles):
        """A list of views, in order; none if one of them cannot be had (same errors as get)."""
        cdef list views = []
        for handle in handles:
            views.append(self._view(handle))
        return views

    cdef View _view(self, object handle):
        cdef Parts p
        self._parts(handle, &p)
        cdef int rc = srl_acquire(&self.a, p.slot, p.generation, p.nonce)
        if rc:
            self._refuse(rc, handle)
        self.users += 1  # before there is a view: making it may run a collection, and that a close()
        cdef View view = View.__new__(View)
        view.core, view.handle, view.slot, view.held = self, handle, p.slot, True
        cdef srl_block *b = self.a.blocks + p.slot
        if (b.word >> 16) & SRL_SPILLED:
            self._map_file(view, &p, b.nbytes, b.tail_nbytes)
            return view
        cdef uint64_t at = b.offset, n = b.nbytes, span = b.span  # read once: what is checked is what is used
        if span > self.data_nbytes or at > self.data_nbytes - span or n > span:
            raise ArenaCorrupt(f"{handle!r}: {n} bytes in {span} at {at} of {self.data_nbytes}")
        view.at, view.n, view.row = self.data + at, <Py_ssize_t> n, 1
        return view

    cdef int _map_file(self, View view, Parts *p, uint64_t n, uint64_t tail) except -1:
        """A spilled block is mapped by each view of it, for the view's life."""
        cdef uint64_t nbytes = max(srl_tail_at(n) + tail if tail else n, <uint64_t> 1)
        if n >> 48:
            raise ArenaCorrupt(f"{view.handle!r}: a spilled block of {n} bytes")
        cdef int rc = srl_spill_map(self.live.spill, p.slot, p.generation, nbytes, &view.at)
        if rc == -EUCLEAN or rc == -ENOENT:
            raise ArenaCorrupt(f"{view.handle!r}: its file of {nbytes} bytes in {self._spill_dir()} was removed or "
                               "cut, or the arena unlinked")
        if rc == -ENXIO:
            raise ArenaCorrupt(f"{view.handle!r}: its file in {self._spill_dir()} was replaced by a link, a pipe or "
                               "something else that is no regular file")
        if rc:
            raise ArenaError(f"{view.handle!r}: its file in {self._spill_dir()} cannot be mapped: {strerror(-rc)}")
        view.file, view.mapped, view.n, view.row = view.at, nbytes, <Py_ssize_t> n, 1
        return 0

    # --------------------------------------------------------------------------------------------------- who, and how

    cdef str _who(self, uint32_t process):
        """Whoever is attached there, or was last."""
        if process >= self.a.max_processes:
            return f"process {process}"
        cdef srl_process *p = self.a.processes + process
        return f"{text_of(p.name, sizeof(p.name))} ({p.pid})"

    cdef str _fate(self, uint32_t slot, uint32_t generation):
        """How a block ended: "discarded by env-server:math (812), 3.2 s ago"; "" when no event says so any more."""
        cdef srl_event e
        if not srl_event_ending(&self.a, slot, generation, &e):
            return ""
        ago_s = max(0, <int64_t> (srl_now_ns(CLOCK_MONOTONIC) - e.at_ns)) / 1e9
        return f"{ended(e.mark >> 8 & 255)} by {self._who(e.mark & 255)}, {ago_s:.1f} s ago"

    cdef int _unsealable(self, int rc, uint32_t slot, uint32_t generation, str tag) except -1:
        fate = self._fate(slot, generation) if rc == -ECANCELED else ""
        return check(rc, f"block {tag!r}", fate and f"was {fate}, before it was sealed")

    cdef str _owner(self, uint32_t slot):
        cdef uint64_t word = self.a.blocks[slot].word
        cdef uint32_t owner = word & 0xffff
        who = self._who(owner)
        if word >> 16 & SRL_ORPHAN:
            return f"an orphan of {who}"
        if (self.number, owner, getpid()) in HERE:
            return f"owned by another attachment of this process, {who}"
        return f"owned by {who}"

    cdef int _refuse(self, int rc, object handle) except -1:
        """check() of what a verb answered about a handle, with what is still known of the block."""
        cdef Parts p
        self._parts(handle, &p)
        if rc == -ESTALE and (fate := self._fate(p.slot, p.generation)):
            return check(rc, handle, f"was {fate}")
        return check(rc, handle, f"is {self._owner(p.slot)}; adopt it first" if rc == -EPERM else "")

    # ------------------------------------------------------------------------------------------------------ ownership

    cdef tuple _each(self, object handles, verb_fn verb):
        """(how many went well, code of the first that did not, its handle); goes on after a failure."""
        cdef Parts p
        cdef int rc, bad = 0
        first, n = None, 0
        for handle in _listed(handles):
            self._parts(handle, &p)
            rc = verb(&self.a, p.slot, p.generation, p.nonce)
            n += rc == 0
            if rc and not bad:
                bad, first = rc, handle
        return n, bad, first

    def adopt(self, handles):
        """Makes this process the owner of sealed blocks (orphans too). All it can, then StaleHandle."""
        _, bad, first = self._each(handles, srl_adopt)
        if bad:
            self._refuse(bad, first)

    def ship(self, handles, readers, step=None):
        """Arms the done set of owned blocks, clearing an earlier one: freed when `readers` distinct readers are done.

        readers: 1 to 256. step: 0 to 2^63 - 1, for the statistics. Errors: NotOwner, StaleHandle.
        """
        cdef Parts p
        readers = PyNumber_Index(readers)
        if not 1 <= readers <= 256:
            raise ValueError(f"readers={readers}: 1 to 256")
        step = None if step is None else PyNumber_Index(step)
        if step is not None and not 0 <= step < 1 << 63:
            raise ValueError(f"step={step}: 0 to 2^63 - 1, or None")
        cdef int64_t at = -1 if step is None else step
        cdef int rc
        for handle in _listed(handles):
            self._parts(handle, &p)
            rc = srl_ship(&self.a, p.slot, p.generation, p.nonce, readers, at)
            if rc:
                self._refuse(rc, handle)

    def done(self, handles, reader=None):
        """This reader needs the blocks no more; idempotent per reader, the last one frees. Defaults to attach's reader.

        Without either it is the process's slot, which is another one after a restart and may be another's index:
        give every reader of a block an index, or none. A freed block is no error; one never shipped is a ValueError.
        """
        cdef Parts p
        index = self.reader_index if reader is None else PyNumber_Index(reader)
        if not 0 <= index <= 255:
            raise ValueError(f"reader={index}: 0 to 255")
        for handle in _listed(handles):
            self._parts(handle, &p)
            check(srl_done(&self.a, p.slot, p.generation, p.nonce, index), handle)

    def free(self, handles):
        """Frees owned blocks -> how many. All it can, then AlreadyFreed, NotOwner or NotSealed for the first left."""
        cdef Parts p
        n, bad, first = self._each(handles, srl_free)
        if bad == -ESTALE:
            self._parts(first, &p)
            fate = self._fate(p.slot, p.generation) or "freed already"
            raise AlreadyFreed(f"{Handle(first)!r} was {fate}; {n} others were freed now")
        if bad:
            self._refuse(bad, first)
        return n

    def discard(self, str tag_prefix not None):
        """Retires every block under a tag prefix (path components), whoever owns it -> how many.

        Unsealed ones are freed by their seal(), which raises AlreadyFreed; blocks reserved later are not covered.
        """
        self._alive()
        cdef bytes raw = tag_prefix.strip("/").encode()
        if not raw:
            raise ValueError("discard() of an empty prefix would discard every block of every run")
        return srl_discard(&self.a, PyBytes_AsString(raw), len(raw))

    def sweep(self):
        """Recovers what dead processes left, now -> how many of them there were. Anyone may call it at any time."""
        self._alive()
        cdef int n
        self.users += 1
        with nogil:
            n = srl_sweep_dead(&self.a, &self.live)
        self._leave()
        return n

    # --------------------------------------------------------------------------------------- what arena.py builds on

    def _data_at(self):
        """(address, bytes) of the data's mapping."""
        self._alive()
        return <uintptr_t> self.data, self.data_nbytes

    def _others_alive(self):
        self._alive()
        return srl_others_alive(&self.a, &self.live) != 0

    def _commit_data(self, uint64_t first, uint64_t end):
        """Commits data pages [first, end) and their records -> 0 or errno."""
        self._alive()
        cdef int rc
        cdef uint64_t records = <uint64_t> (<uint8_t *> self.a.pages - self.ctl) + first * 64
        self.users += 1
        with nogil:
            rc = posix_fallocate(self.ctl_fd, <int64_t> records, <int64_t> ((end - first) * 64))
            if rc == 0:
                rc = posix_fallocate(self.data_fd, <int64_t> (first * SRL_PAGE), <int64_t> ((end - first) * SRL_PAGE))
            if rc == 0:
                rc = -srl_commit_pages(&self.a, first, end, srl_now_ns(CLOCK_MONOTONIC) + LOCK_NS)
        self._leave()
        return rc

    def _commit_table(self, uint64_t first, uint64_t end):
        """Commits descriptors [first, end) -> 0 or errno."""
        self._alive()
        cdef int rc
        cdef int64_t at = <int64_t> (<uint8_t *> self.a.blocks - self.ctl) + <int64_t> (first * 256)
        self.users += 1
        with nogil:
            rc = posix_fallocate(self.ctl_fd, at, <int64_t> ((end - first) * 256))
            if rc == 0:
                rc = -srl_commit_table(&self.a, first, end, srl_now_ns(CLOCK_MONOTONIC) + LOCK_NS)
        self._leave()
        return rc

    def _spill_dir(self):
        """This arena's own spill directory, "" if it has none."""
        self._alive()
        return text_of(self.a.h.spill_dir, SRL_SPILL_DIR_MAX)

    def _kept(self):
        """Bytes that are kept for sources within their shares from all others."""
        self._alive()
        return srl_share_kept(&self.a, SRL_NONE)

    def _header(self):
        """Header words that change and that do not -> dict."""
        self._alive()
        cdef srl_header *h = self.a.h
        if not srl_counts_are_sane(&self.a):
            check(-EUCLEAN, "header:")
        return dict(capacity=self.data_nbytes, used_bytes=h.used_bytes, boot=h.boot, committed_pages=h.committed_pages,
                    max_pages=self.a.max_pages, max_blocks=self.a.max_blocks, table_committed=h.table_committed,
                    table_step=h.table_step, huge=h.huge)

    def _drain(self):
        """Gives back what releases left pending while the allocator's lock was taken, unless it is again."""
        self._alive()
        srl_drain_if_free(&self.a)

    def _window(self, bint data):
        """Our own mapping of ctl, or of data, for an inspector: its page tables are warm."""
        self._alive()
        cdef Window window = Window.__new__(Window)
        window.core = self
        window.at, window.n = (self.data, self.data_nbytes) if data else (self.ctl, self.ctl_nbytes)
        return window

    def _locked_call(self, call):
        """What `call()` returns, under the allocator's lock; it must not come back to this arena."""
        self._alive()
        self.users += 1
        try:
            self._locked()
            try:
                return call()
            finally:
                srl_unlock(&self.a)
        finally:
            self._leave()

    cdef int _locked(self) except -1:
        cdef int rc
        cdef uint64_t deadline = srl_now_ns(CLOCK_MONOTONIC) + LOCK_NS
        with nogil:
            rc = srl_lock(&self.a, deadline)
        if rc == -ETIMEDOUT:
            self._raise_stalled(5.0)
        return check(rc, "lock:")


cdef object _listed(object handles):
    return (handles,) if isinstance(handles, bytes) else handles
