# cython: language_level=3, boundscheck=False, wraparound=False
"""Engine answers, read in C with the GIL released: what grows with their tokens as arrays, the rest as JSON.

Called by inference/answers.py in env workers. Keeps nothing.
"""

from cpython.bytes cimport PyBytes_FromStringAndSize
from libc.errno cimport ENOMEM
from libc.stdint cimport int64_t


cdef extern from "payload_answers.h" nogil:
    enum:
        SRL_CONTENT, SRL_TOKEN_IDS, SRL_MASK, SRL_ROUTED, SRL_PARTS
        SRL_TOKENS, SRL_LOGPROBS, SRL_HEAD_COUNTS, SRL_HEAD_IDS, SRL_HEAD_LOGPROBS, SRL_KEPT_COUNTS, SRL_KEPT_IDS

    ctypedef struct srl_array_t:
        char *data
        int64_t nbytes

    ctypedef struct srl_span_t:
        int64_t start, stop

    ctypedef struct srl_answer_t:
        srl_span_t *spans
        srl_array_t *arrays

    int srl_answer_read(const char *, int64_t, srl_answer_t *)
    void srl_answer_free(srl_answer_t *)


def split(bytes text not None):
    """None where the answer is of a form that this does not know, else (rest, token_ids, content, mask, routed).

    rest: the answer with null for what was read. The others are None where the answer has none: token_ids int32 [T];
    content: log-probabilities float64 [T], head counts int32 [T], head ids int32 and head log-probabilities float32
    [sum of the counts]; mask: counts int32 [T] and ids; each as bytes. routed: base64 as str. MemoryError.
    """
    cdef srl_answer_t answer
    cdef const char *start = text
    cdef int64_t length = len(text)
    cdef int code
    with nogil:
        code = srl_answer_read(start, length, &answer)
    try:
        if code == -ENOMEM:
            raise MemoryError(f"no memory for the arrays of an answer of {length} bytes")
        if code:
            return None
        return (
            rest(text, &answer),
            array(&answer, SRL_TOKENS) if answer.spans[SRL_TOKEN_IDS].stop else None,
            arrays(&answer, SRL_LOGPROBS, SRL_HEAD_LOGPROBS) if answer.spans[SRL_CONTENT].stop else None,
            arrays(&answer, SRL_KEPT_COUNTS, SRL_KEPT_IDS) if answer.spans[SRL_MASK].stop else None,
            routed(text, answer.spans[SRL_ROUTED]),
        )
    finally:
        srl_answer_free(&answer)


cdef object array(srl_answer_t *answer, int name):
    return PyBytes_FromStringAndSize(answer.arrays[name].data, answer.arrays[name].nbytes)


cdef object arrays(srl_answer_t *answer, int first, int last):
    return tuple([array(answer, name) for name in range(first, last + 1)])


cdef object rest(bytes text, srl_answer_t *answer):
    cdef int64_t at = 0
    spans = sorted([(answer.spans[part].start, answer.spans[part].stop) for part in range(SRL_PARTS)])
    pieces = []
    for start, stop in spans:
        if stop:
            pieces += [text[at:start], b"null"]
            at = stop
    return b"".join([*pieces, text[at:]])


cdef object routed(bytes text, srl_span_t span):
    if not span.stop:
        return None
    return text[span.start + 1 : span.stop - 1].decode("latin1")
