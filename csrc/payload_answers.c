/* payload_answers.c: an engine's answer, megabytes of JSON, read without an object per number.
 *
 * One pass over the text: what grows with the sampled tokens goes into arrays, the rest is skipped and stays for a JSON
 * library. Strict where it reads: of any other form than the one below it says -EINVAL, and nothing of the answer is
 * used. Called by shmrl/payload/_answers.pyx in env workers, with the GIL released.
 *
 *   {"choices": [{"token_ids": [7, ...], "sampling_mask": [[3, 7], ...], "routed_experts": "k05V...",
 *                 "logprobs": {"content": [ENTRY + "top_logprobs": [ENTRY, ...], ...]}, ...}, ...], ...}
 *   ENTRY: "token_id": 7 (vLLM 0.32) or "token": "token_id:7" (0.30), and "logprob": -0.25
 */
#include "payload_answers.h"

#include <stdlib.h>

#include "payload_json.h"

/* ------------------------------------------------------------------------------------------------------- arrays */

static int append(srl_array_t *a, const void *item, int64_t nbytes) {
    if (a->nbytes + nbytes > a->room) {
        int64_t room = a->room ? 2 * a->room : 4096;
        char *data = realloc(a->data, (size_t)room);
        if (!data) {
            return -ENOMEM;
        }
        a->data = data;
        a->room = room;
    }
    memcpy(a->data + a->nbytes, item, (size_t)nbytes);
    a->nbytes += nbytes;
    return 0;
}

static int append_i32(srl_array_t *a, int64_t value) {
    int32_t narrow = (int32_t)value;
    return append(a, &narrow, sizeof narrow);
}

void srl_answer_free(srl_answer_t *a) {
    for (int i = 0; i < SRL_ARRAYS; i++) {
        free(a->arrays[i].data);
    }
}

/* ----------------------------------------------------------------------------------------------------------- ids */

static int id(srl_json_t *c, int64_t *found) {
    double ignored;
    return srl_json_number(c, &ignored, found) || *found < 0 ? -EINVAL : 0;
}

/* "token_id:7" */
static int id_in_text(srl_json_t *c, int64_t *found) {
    static const char head[] = "token_id:";
    const char *text;
    int64_t length, prefix = (int64_t)sizeof head - 1, value = 0;
    if (srl_json_string(c, &text, &length) != 0 || length <= prefix || length > prefix + 10 ||
        memcmp(text, head, (size_t)prefix)) {
        return -EINVAL;
    }
    for (int64_t i = prefix; i < length; i++) {
        if ((unsigned char)(text[i] - '0') > 9) {
            return -EINVAL;
        }
        value = 10 * value + (text[i] - '0');
    }
    *found = value;
    return value <= INT32_MAX ? 0 : -EINVAL;
}

/* ------------------------------------------------------------------------------------------------------- reading */

static int read_ids(srl_json_t *c, srl_array_t *ids, int64_t *count) {
    int more, first = 1;
    int64_t value;
    if (!srl_json_is(c, '[')) {
        return -EINVAL;
    }
    for (*count = 0; (more = srl_json_another(c, ']', first)) == 1; first = 0, (*count)++) {
        int code = id(c, &value);
        if (code || (code = append_i32(ids, value))) {
            return code;
        }
    }
    return more;
}

static int read_rows(srl_json_t *c, srl_array_t *ids, srl_array_t *counts) {
    int more, first = 1;
    int64_t count;
    if (!srl_json_is(c, '[')) {
        return -EINVAL;
    }
    for (; (more = srl_json_another(c, ']', first)) == 1; first = 0) {
        int code = read_ids(c, ids, &count);
        if (code || (code = append_i32(counts, count))) {
            return code;
        }
    }
    return more;
}

static int read_top(srl_json_t *c, srl_answer_t *a, int64_t *count);

/* An entry of logprobs.content, or one of its top ones. count: of those, -1 where it is one itself. */
static int read_entry(srl_json_t *c, srl_answer_t *a, int64_t *found, double *logprob, int64_t *count) {
    const char *text;
    int64_t length, number_id = -1, text_id = -1, ignored;
    int more, first = 1, code, has_logprob = 0, has_top = 0, top = *count >= 0;
    if (!srl_json_is(c, '{')) {
        return -EINVAL;
    }
    for (; (more = srl_json_another(c, '}', first)) == 1; first = 0) {
        if (srl_json_key(c, &text, &length)) {
            return -EINVAL;
        }
        if (srl_json_same(text, length, "logprob")) {
            code = has_logprob++ ? -EINVAL : srl_json_number(c, logprob, &ignored);
        } else if (srl_json_same(text, length, "token_id")) {
            code = number_id >= 0 ? -EINVAL : id(c, &number_id);
        } else if (srl_json_same(text, length, "token")) {
            code = text_id >= 0 ? -EINVAL : id_in_text(c, &text_id);
        } else if (top && srl_json_same(text, length, "top_logprobs")) {
            code = has_top++ ? -EINVAL : read_top(c, a, count);
        } else {
            code = length < 0 ? -EINVAL : srl_json_skip(c, 0); /* an escaped key might be one of these */
        }
        if (code) {
            return code;
        }
    }
    *found = number_id >= 0 ? number_id : text_id;
    return more ? more : has_logprob && *found >= 0 ? 0 : -EINVAL;
}

static int read_top(srl_json_t *c, srl_answer_t *a, int64_t *count) {
    int more, first = 1;
    if (!srl_json_is(c, '[')) {
        return -EINVAL;
    }
    for (*count = 0; (more = srl_json_another(c, ']', first)) == 1; first = 0, (*count)++) {
        int64_t found, none = -1;
        double logprob;
        int code = read_entry(c, a, &found, &logprob, &none);
        if (code) {
            return code;
        }
        float narrow = (float)logprob;
        if ((code = append_i32(&a->arrays[SRL_HEAD_IDS], found)) ||
            (code = append(&a->arrays[SRL_HEAD_LOGPROBS], &narrow, sizeof narrow))) {
            return code;
        }
    }
    return more;
}

static int read_content(srl_json_t *c, srl_answer_t *a) {
    int more, first = 1;
    if (!srl_json_is(c, '[')) {
        return -EINVAL;
    }
    for (; (more = srl_json_another(c, ']', first)) == 1; first = 0) {
        int64_t found, count = 0;
        double logprob;
        int code = read_entry(c, a, &found, &logprob, &count);
        if (code || (code = append(&a->arrays[SRL_LOGPROBS], &logprob, sizeof logprob)) ||
            (code = append_i32(&a->arrays[SRL_HEAD_COUNTS], count))) {
            return code;
        }
    }
    return more;
}

/* A value that is to be read: its place is noted, once; null stays for who reads the rest. 1: there is none to read. */
static int begin(srl_json_t *c, srl_answer_t *a, srl_part_t part) {
    if (a->spans[part].stop) {
        return -EINVAL;
    }
    if (srl_json_word(c, "null")) {
        return 1;
    }
    a->spans[part].start = c->at - c->start;
    return 0;
}

static int read_part(srl_json_t *c, srl_answer_t *a, srl_part_t part) {
    const char *text;
    int64_t ignored;
    int code = begin(c, a, part);
    if (code) {
        return code < 0 ? code : 0;
    }
    switch (part) {
    case SRL_CONTENT:
        code = read_content(c, a);
        break;
    case SRL_TOKEN_IDS:
        code = read_ids(c, &a->arrays[SRL_TOKENS], &ignored);
        break;
    case SRL_MASK:
        code = read_rows(c, &a->arrays[SRL_KEPT_IDS], &a->arrays[SRL_KEPT_COUNTS]);
        break;
    default:
        code = srl_json_string(c, &text, &ignored);
    }
    a->spans[part].stop = c->at - c->start;
    return code ? (code < 0 ? code : -EINVAL) : 0; /* a string with escapes is no base64 */
}

static int read_logprobs(srl_json_t *c, srl_answer_t *a) {
    const char *text;
    int64_t length;
    int more, first = 1;
    if (srl_json_word(c, "null")) {
        return 0;
    }
    if (!srl_json_is(c, '{')) {
        return -EINVAL;
    }
    for (; (more = srl_json_another(c, '}', first)) == 1; first = 0) {
        if (srl_json_key(c, &text, &length) || length < 0) {
            return -EINVAL;
        }
        int code =
            srl_json_same(text, length, "content") ? read_part(c, a, SRL_CONTENT) : srl_json_skip(c, 0);
        if (code) {
            return code;
        }
    }
    return more;
}

static int read_choice(srl_json_t *c, srl_answer_t *a) {
    static const struct {
        const char *key;
        srl_part_t part;
    } parts[] = {{"token_ids", SRL_TOKEN_IDS}, {"sampling_mask", SRL_MASK}, {"routed_experts", SRL_ROUTED}};
    const char *text;
    int64_t length;
    int more, first = 1, logprobs = 0;
    if (!srl_json_is(c, '{')) {
        return -EINVAL;
    }
    for (; (more = srl_json_another(c, '}', first)) == 1; first = 0) {
        if (srl_json_key(c, &text, &length) || length < 0) {
            return -EINVAL;
        }
        int at = 0, code;
        while (at < 3 && !srl_json_same(text, length, parts[at].key)) {
            at++;
        }
        if (at < 3) {
            code = read_part(c, a, parts[at].part);
        } else if (srl_json_same(text, length, "logprobs")) {
            code = logprobs++ ? -EINVAL : read_logprobs(c, a);
        } else {
            code = srl_json_skip(c, 0);
        }
        if (code) {
            return code;
        }
    }
    return more;
}

static int read_choices(srl_json_t *c, srl_answer_t *a) {
    int more, first = 1;
    if (!srl_json_is(c, '[')) {
        return -EINVAL;
    }
    for (; (more = srl_json_another(c, ']', first)) == 1; first = 0) {
        int code = first ? read_choice(c, a) : srl_json_skip(c, 0);
        if (code) {
            return code;
        }
    }
    return more;
}

int srl_answer_read(const char *text, int64_t length, srl_answer_t *a) {
    srl_json_t c = {text, text + length, text};
    const char *name;
    int64_t of_name;
    int more, first = 1, choices = 0;
    memset(a, 0, sizeof *a);
    if (!srl_json_is(&c, '{')) {
        return -EINVAL;
    }
    for (; (more = srl_json_another(&c, '}', first)) == 1; first = 0) {
        if (srl_json_key(&c, &name, &of_name) || of_name < 0) {
            return -EINVAL;
        }
        int wanted = srl_json_same(name, of_name, "choices");
        int code = !wanted ? srl_json_skip(&c, 0) : choices++ ? -EINVAL : read_choices(&c, a);
        if (code) {
            return code;
        }
    }
    srl_json_space(&c);
    return more ? more : c.at == c.end ? 0 : -EINVAL;
}
