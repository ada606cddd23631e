/* srl_base64_decode at every length up to 400 and with one bad character at every place, against a plain loop.
 *
 * Built by tests/payload/test_base64.py. Prints "ok", or what differs.
 */
#include "payload.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MOST 400

static const char alphabet[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

static void differs(const char *what, int64_t n, int64_t at) {
    printf("%s: %lld characters, %lld\n", what, (long long)n, (long long)at);
    exit(1);
}

int main(void) {
    for (int64_t n = 0; n <= MOST; n += 4) {
        /* exact sizes: a sanitizer sees the first byte too many */
        char *text = malloc(n + 1);
        uint8_t *out = malloc(n / 4 * 3 + 1), *wanted = malloc(n / 4 * 3 + 1);
        for (int64_t i = 0; i < n; i++)
            text[i] = alphabet[(i * 37 + i / 64 + n) % 64];
        for (int64_t i = 0; i < n; i += 4) {
            uint32_t bits = 0;
            for (int64_t j = i; j < i + 4; j++)
                bits = bits << 6 | (uint32_t)(strchr(alphabet, text[j]) - alphabet);
            for (int64_t j = 0; j < 3; j++)
                wanted[i / 4 * 3 + j] = (uint8_t)(bits >> (16 - 8 * j));
        }
        int64_t where = 0, nbytes = n / 4 * 3;
        if (srl_base64_decode(text, n, out, nbytes, &where) != nbytes || memcmp(out, wanted, nbytes))
            differs("bytes", n, where);
        for (int64_t i = 0; i < n; i++)
            for (const char *bad = "@[`{,-.:*~\x80\xff "; *bad; bad++) {
                char good = text[i];
                text[i] = *bad;
                if (srl_base64_decode(text, n, out, nbytes, &where) >= 0 || where != i)
                    differs("position", n, i);
                text[i] = good;
            }
        free(text);
        free(out);
        free(wanted);
    }
    puts("ok");
    return 0;
}
