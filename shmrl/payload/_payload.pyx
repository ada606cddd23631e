# cython: language_level=3, boundscheck=False, wraparound=False
"""The payload room's binding: buffers in, one C call with the GIL released, errors as (code, position).

Owns no data. Called by branch.py, checks.py, encode.py and forms.py in env workers, by assemble.py in trainer ranks.
Arrays come as C-contiguous buffers (numpy is not imported here); the Python callers turn positions into PayloadErrors.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.unicode cimport PyUnicode_AsUTF8AndSize
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc


cdef extern from "payload.h" nogil:
    ctypedef int srl_int_t

    ctypedef struct srl_block_t:
        const uint8_t *base
        int64_t nbytes

    ctypedef struct srl_copy_t:
        int64_t block

    int srl_check_ids(const void *, srl_int_t, int64_t, int64_t, int64_t, uint32_t *, int64_t *)
    int srl_narrow(const void *, srl_int_t, int64_t, void *, int)
    ctypedef struct srl_rows_t:
        const void *source
        int64_t skip, row_ids, k, limit, rows_per_crc
        int base64, dst_nbytes
        srl_int_t type

    int srl_store_rows(const srl_rows_t *, int64_t, int64_t, uint8_t *, int64_t, uint32_t *, uint8_t *, uint32_t *,
                       int64_t, int64_t *)
    int64_t srl_rows_scratch(const srl_rows_t *)
    int64_t srl_rows_parts(const srl_rows_t *, int64_t)
    int srl_check_kept(const int32_t *, const int32_t *, const int32_t *, int64_t, int64_t *)
    int64_t srl_base64_decode(const char *, int64_t, uint8_t *, int64_t, int64_t *)
    int srl_gather(const srl_block_t *, int64_t, const srl_copy_t *, int64_t, uint8_t *, int64_t, int64_t *)
    int64_t srl_count_bits(const uint8_t *, int64_t, int64_t)
    void srl_unpack_bits(const uint8_t *, int64_t, int64_t, uint8_t *)


cdef extern from "arena_core.h" nogil:
    void srl_copy_blocks(void *, const void *, uint64_t, uint64_t, uint32_t *)


cdef class Buffer:
    """One acquired buffer; released with the object, or earlier by `release()`."""
    cdef Py_buffer view   # valid while held
    cdef bint held

    def __cinit__(self, object owner, bint writable=False):
        PyObject_GetBuffer(owner, &self.view, PyBUF_WRITABLE if writable else PyBUF_SIMPLE)
        self.held = True

    def release(self):
        if self.held:
            self.held = False
            PyBuffer_Release(&self.view)

    def __dealloc__(self):
        if self.held:
            PyBuffer_Release(&self.view)


def check_ids(object ids, int type_code, int64_t rows, int64_t k, int64_t limit):
    """(0, -1), or (-errno, flat index): EDOM for an id outside [0, limit), EEXIST for one repeated in its row of k."""
    cdef Buffer source = Buffer(ids)
    cdef int64_t where = -1
    cdef int code
    if rows * k * abs(type_code) > source.view.len:
        raise ValueError(f"{rows} rows of {k} ids do not fit in {source.view.len} bytes")
    cdef uint32_t *seen = <uint32_t *> calloc(<size_t> max(limit, 1), sizeof(uint32_t))
    if seen == NULL:
        raise MemoryError(f"no memory to mark {limit} ids")
    with nogil:
        code = srl_check_ids(source.view.buf, type_code, rows, k, limit, seen, &where)
        free(seen)
    return code, where


def narrow(object src, int type_code, object dst, int dst_nbytes):
    """Copies ids of type_code (itemsize, negative when signed) into dst as unsigned integers of dst_nbytes."""
    cdef Buffer source = Buffer(src)
    cdef Buffer target = Buffer(dst, True)
    cdef int64_t count = source.view.len // abs(type_code)
    cdef int code
    if count * dst_nbytes > target.view.len:
        raise ValueError(f"{count} ids of {dst_nbytes} bytes do not fit in {target.view.len} bytes")
    with nogil:
        code = srl_narrow(source.view.buf, type_code, count, target.view.buf, dst_nbytes)
    if code:
        raise ValueError(f"cannot narrow type {type_code} to {dst_nbytes} bytes")


def store_rows(object source, int64_t skip, int type_code, tuple shape, int64_t limit, int64_t first, object dst,
               int dst_nbytes, int64_t at, object crcs, int64_t rows_per_crc):
    """Positions first .. of `source`, as many as fit in `dst`, decoded, checked, narrowed and written in one pass.

    source: text in base64 (str), of which `skip` bytes come first, or a buffer of ids. type_code: of the ids there.
    shape: (n, L, K) of all of it. dst: writable, ids of dst_nbytes. at: where in the column dst begins; crcs: uint32
    per rows_per_crc positions of the column, continued. Returns (0, -1), or (-errno, position): EINVAL with a
    character, EDOM and EEXIST with a flat index from `first` on.
    """
    cdef Buffer target = Buffer(dst, True)
    cdef Buffer sums = Buffer(crcs, True)
    cdef Buffer ids = None
    cdef srl_rows_t r
    cdef Py_ssize_t length = 0
    cdef int64_t where = -1
    cdef int code
    _, layers, k = shape
    r.skip, r.row_ids, r.k, r.limit, r.rows_per_crc = skip, layers * k, k, limit, rows_per_crc
    r.base64, r.dst_nbytes, r.type = isinstance(source, str), dst_nbytes, type_code
    if r.row_ids < 1 or limit < 1 or rows_per_crc < 1:
        raise ValueError(f"rows of {r.row_ids} ids below {limit}, {rows_per_crc} under a checksum")
    cdef int64_t rows = target.view.len // (r.row_ids * dst_nbytes)
    end = skip + (first + rows) * r.row_ids * abs(type_code)
    if r.base64:
        r.source = PyUnicode_AsUTF8AndSize(source, &length)
        end = -(-end // 3) * 4
    else:
        ids = Buffer(source)
        r.source, length = ids.view.buf, ids.view.len
    if min(skip, first, at) < 0 or end > length or -(-(at + rows) // rows_per_crc) * 4 > sums.view.len:
        raise ValueError(f"rows [{first}, {first + rows}) at {at} leave their source or the checksums")
    cdef int64_t parts = srl_rows_parts(&r, rows)
    cdef uint8_t *scratch = <uint8_t *> malloc(<size_t> (parts * srl_rows_scratch(&r)))
    cdef uint32_t *seen = <uint32_t *> calloc(<size_t> (parts * limit), sizeof(uint32_t))
    if scratch == NULL or seen == NULL:
        free(scratch)
        free(seen)
        raise MemoryError(f"no memory to mark {limit} ids")
    with nogil:
        code = srl_store_rows(&r, first, rows, <uint8_t *> target.view.buf, at, <uint32_t *> sums.view.buf, scratch,
                              seen, parts, &where)
        free(scratch)
        free(seen)
    return code, where


def copy_rows(object source, object dst, int64_t block_nbytes, object crcs):
    """Bytes of `source` into `dst`, as long; crcs: uint32 of each block_nbytes of them."""
    cdef Buffer bytes_ = Buffer(source)
    cdef Buffer target = Buffer(dst, True)
    cdef Buffer sums = Buffer(crcs, True)
    cdef int64_t nbytes = bytes_.view.len
    if block_nbytes < 1 or target.view.len != nbytes or -(-nbytes // block_nbytes) * 4 != sums.view.len:
        told = f"{sums.view.len // 4} checksums of {block_nbytes} bytes"
        raise ValueError(f"{nbytes} bytes into {target.view.len}, {told}")
    with nogil:
        srl_copy_blocks(target.view.buf, bytes_.view.buf, <uint64_t> nbytes, <uint64_t> block_nbytes,
                        <uint32_t *> sums.view.buf)


def check_kept(object kept, object counts, object sampled):
    """-1, or the first row whose sampled id is not among its kept ids. All three are int32; counts sum to len(kept)."""
    cdef Buffer ids = Buffer(kept)
    cdef Buffer sizes = Buffer(counts)
    cdef Buffer tokens = Buffer(sampled)
    cdef int64_t rows = sizes.view.len // sizeof(int32_t)
    cdef int64_t where = -1
    with nogil:
        srl_check_kept(<int32_t *> ids.view.buf, <int32_t *> sizes.view.buf, <int32_t *> tokens.view.buf, rows, &where)
    return where


def decode_base64(object text, object out, Py_ssize_t start=0, Py_ssize_t stop=-1):
    """Bytes written to `out` (writable), or (-1 - position) of the first bad character.

    start, stop: decode these characters alone, whole groups of four; `out` has at least 3 bytes for each group.
    """
    cdef Buffer target = Buffer(out, True)
    cdef Buffer source = None
    cdef const char *chars
    cdef Py_ssize_t length
    cdef int64_t where = 0
    cdef int64_t written
    if isinstance(text, str):
        chars = PyUnicode_AsUTF8AndSize(text, &length)
    else:
        source = Buffer(text)
        chars = <const char *> source.view.buf
        length = source.view.len
    stop = length if stop < 0 else stop
    if not 0 <= start <= stop <= length:
        raise ValueError(f"characters [{start}, {stop}) of {length}")
    with nogil:
        written = srl_base64_decode(chars + start, stop - start, <uint8_t *> target.view.buf, target.view.len, &where)
    return written if written >= 0 else -1 - start - where


cdef class Sources:
    """The mapped blocks of one assembly: one buffer per block, held from construction to `release()`."""
    cdef list buffers           # Buffer of each block, in the order given
    cdef srl_block_t *blocks    # their addresses; freed with the object
    cdef int64_t count

    def __cinit__(self, list views):
        cdef Buffer buffer
        self.buffers = [Buffer(view) for view in views]
        self.count = len(views)
        self.blocks = <srl_block_t *> calloc(<size_t> max(self.count, 1), sizeof(srl_block_t))
        if self.blocks == NULL:
            raise MemoryError(f"no memory for {self.count} block addresses")
        for i in range(self.count):
            buffer = self.buffers[i]
            self.blocks[i].base = <const uint8_t *> buffer.view.buf
            self.blocks[i].nbytes = buffer.view.len

    def __dealloc__(self):
        free(self.blocks)

    def release(self):
        """Lets go of every block, so that the arena's views can be released."""
        cdef Buffer buffer
        self.count = 0
        for buffer in self.buffers:
            buffer.release()

    def gather(self, object copies, object out):
        """Runs int64 [n, 7] copies (block, src offset, src stride, dst offset, dst stride, rows, row_nbytes)."""
        cdef Buffer table = Buffer(copies)
        cdef Buffer target = Buffer(out, True)
        cdef int64_t where = -1
        cdef int64_t count = table.view.len // 56
        cdef int code
        with nogil:
            code = srl_gather(self.blocks, self.count, <srl_copy_t *> table.view.buf, count,
                              <uint8_t *> target.view.buf, target.view.len, &where)
        if code:
            raise ValueError(f"copy {where} of {count} leaves its block or the destination")

    def count_bits(self, int64_t block, int64_t offset, int64_t start, int64_t stop):
        """Set bits of bits [start, stop) of the bit column at `offset` of a block."""
        self._check_bits(block, offset, start, stop)
        return srl_count_bits(self.blocks[block].base + offset, start, stop)

    def unpack_bits(self, int64_t block, int64_t offset, int64_t start, int64_t stop, object out):
        """Writes bits [start, stop) to `out`, one byte each."""
        cdef Buffer target = Buffer(out, True)
        self._check_bits(block, offset, start, stop)
        if target.view.len < stop - start:
            raise ValueError(f"{stop - start} bits do not fit in {target.view.len} bytes")
        with nogil:
            srl_unpack_bits(self.blocks[block].base + offset, start, stop, <uint8_t *> target.view.buf)

    cdef int _check_bits(self, int64_t block, int64_t offset, int64_t start, int64_t stop) except -1:
        if not (0 <= block < self.count and 0 <= start <= stop and 0 <= offset
                and offset + (stop + 7) // 8 <= self.blocks[block].nbytes):
            raise ValueError(f"bits [{start}, {stop}) at byte {offset} leave block {block}")
        return 0
