/* SPDX-License-Identifier: Apache-2.0 */
/* file_kind.c -- names the kind of a file by a table of signatures, which are those of the formats'
 * specifications; the names are file(1)'s. */
#include "base/file_kind.h"

#include <ctype.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/files.h"
#include "base/sizes.h"

#define DECOMPRESS "decompress it first"
#define CONVERT    "convert it to JSON lines, an object per row"
#define CONVERT_BY(function)                                                                       \
    "convert it to JSON lines: python3 -c \"import datasets; datasets.Dataset." function           \
    "('FILE').to_json('FILE.jsonl')\""
#define SAFETENSORS "convert the weights to safetensors"
#define RECODE      "save it as UTF-8, e.g. with iconv"

typedef struct file_kind {
    const char *magic;
    unsigned n_magic, at; /* bytes; offset in the file */
    const char *what, *remedy;
} file_kind;

#define MAGIC(text) text, sizeof(text) - 1

static const file_kind kinds[] = {
    {MAGIC("\x1f\x8b"), 0, "gzip data", DECOMPRESS " (gunzip)"},
    {MAGIC("\x28\xb5\x2f\xfd"), 0, "Zstandard data", DECOMPRESS " (unzstd)"},
    {MAGIC("\xfd"
           "7zXZ\0"),
     0, "xz data", DECOMPRESS " (unxz)"},
    {MAGIC("BZh"), 0, "bzip2 data", DECOMPRESS " (bunzip2)"},
    {MAGIC("\x04\x22\x4d\x18"), 0, "LZ4 data", DECOMPRESS " (unlz4)"},
    {MAGIC("7z\xbc\xaf\x27\x1c"), 0, "a 7-Zip archive", "unpack it first"},
    {MAGIC("ustar"), 257, "a tar archive", "unpack it first"},
    {MAGIC("PAR1"), 0, "a Parquet file", CONVERT_BY("from_parquet")},
    {MAGIC("PARE"), 0, "an encrypted Parquet file", CONVERT},
    {MAGIC("ARROW1\0\0"), 0, "an Arrow or Feather file", CONVERT_BY("from_file")},
    {MAGIC("FEA1"), 0, "a Feather file", CONVERT},
    {MAGIC("ORC"), 0, "an ORC file", CONVERT},
    {MAGIC("Obj\x01"), 0, "an Avro file", CONVERT},
    {MAGIC("SQLite format 3\0"), 0, "an SQLite database", CONVERT},
    {MAGIC("\x93NUMPY"), 0, "a NumPy file", CONVERT},
    {MAGIC("\x89HDF\r\n\x1a\n"), 0, "an HDF5 file", "convert it first"},
    {MAGIC("\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"), 0, "an old Excel or other Office document",
     CONVERT},
    {MAGIC("%PDF-"), 0, "a PDF document", "extract its text and write it as JSON lines"},
    {MAGIC("GGUF"), 0, "a GGUF model", "use the model's Hugging Face files in safetensors"},
    {MAGIC("{\0"), 0, "UTF-16 text", RECODE}, /* without a mark: bl_text_skip_mark sees those */
    {MAGIC("[\0"), 0, "UTF-16 text", RECODE},
    {MAGIC("\0{"), 0, "UTF-16 text", RECODE},
    {MAGIC("\0["), 0, "UTF-16 text", RECODE},
    {MAGIC("version https://git-lfs"), 0, "a Git LFS pointer", "run git lfs pull"},
};

static bool holds(const char *bytes, size_t n_bytes, const char *part)
{
    return memmem(bytes, n_bytes, part, strlen(part)) != NULL;
}

/* A zip archive is known by the names of its first members. */
static bool find_zip(const char *bytes, size_t n_bytes, file_kind *out)
{
    if (n_bytes < 4 || (memcmp(bytes, "PK\3\4", 4) && memcmp(bytes, "PK\5\6", 4))) return false;
    *out = (file_kind){.what = "a zip archive", .remedy = "unpack it first"};
    if (holds(bytes, n_bytes, "data.pkl"))
        *out = (file_kind){.what = "a PyTorch file", .remedy = SAFETENSORS};
    else if (holds(bytes, n_bytes, "[Content_Types].xml") || holds(bytes, n_bytes, "xl/"))
        *out = (file_kind){.what = "an Excel or other Office document", .remedy = CONVERT};
    return true;
}

/* Kinds whose beginning is not one fixed text. */
static bool find_other(const char *bytes, size_t n_bytes, file_kind *out)
{
    size_t blanks = 0;

    if (n_bytes >= 3 && bytes[0] == '\x80' && bytes[1] >= 2 && bytes[1] <= 5) {
        *out = (file_kind){.what = "a Python pickle, as PyTorch writes", .remedy = SAFETENSORS};
        return true;
    }
    /* a continuation mark, then the length of a message of less than 16 MiB */
    if (n_bytes >= 8 && !memcmp(bytes, "\xff\xff\xff\xff", 4) && !bytes[7]) {
        *out = (file_kind){.what = "an Arrow stream", .remedy = CONVERT_BY("from_file")};
        return true;
    }
    /* eight bytes of text of which every other one is NUL */
    for (int first = 0; first < 2; first++) {
        size_t at = 0;
        while (at < 8 && at < n_bytes && !bytes[at] == ((int)at % 2 != first)) at++;
        if (at < 8) continue;
        *out = (file_kind){.what = "UTF-16 text", .remedy = RECODE};
        return true;
    }
    while (blanks < n_bytes && isspace((unsigned char)bytes[blanks])) blanks++;
    bytes += blanks;
    n_bytes -= blanks;
    if ((n_bytes >= 9 && !strncasecmp(bytes, "<!doctype", 9)) ||
        (n_bytes >= 5 && !strncasecmp(bytes, "<html", 5))) {
        *out = (file_kind){.what = "an HTML page", .remedy = "was the download refused?"};
        return true;
    }
    return find_zip(bytes - blanks, n_bytes + blanks, out);
}

bl_status bl_file_kind_refuse(const char *path, const void *bytes, size_t n_bytes,
                              const char *expected)
{
    file_kind kind = {0};
    size_t n = n_bytes < BL_FILE_KIND_BYTES ? n_bytes : BL_FILE_KIND_BYTES;

    for (size_t i = 0; i < BL_COUNT(kinds) && !kind.what; i++)
        if (n >= kinds[i].at + kinds[i].n_magic &&
            !memcmp((const char *)bytes + kinds[i].at, kinds[i].magic, kinds[i].n_magic))
            kind = kinds[i];
    if (!kind.what && !find_other(bytes, n, &kind)) return BL_OK;
    return BL_FAIL(BL_EINPUT, "%s: is %s, not %s: %s", path, kind.what, expected, kind.remedy);
}

/* ---- tables ---- */

static const char *const columns[] = {
    "instruction", "input",     "output", "prompt",   "completion", "text",
    "question",    "answer",    "query",  "response", "messages",   "conversations",
    "context",     "input_ids", "chosen", "rejected", "system"};

/* Whether a field may be a column's name; *known: one that training data use. */
static bool is_column(const char *field, size_t n, bool *known)
{
    while (n && (*field == ' ' || *field == '"')) field++, n--;
    while (n && (field[n - 1] == ' ' || field[n - 1] == '"' || field[n - 1] == '\r')) n--;
    if (n > 64 || (n && !isalpha((unsigned char)*field) && *field != '_')) return false;
    for (size_t i = 0; i < n; i++)
        if (!isalnum((unsigned char)field[i]) && !strchr("_ .-", field[i])) return false;
    for (size_t i = 0; i < BL_COUNT(columns); i++)
        *known |= n == strlen(columns[i]) && !strncasecmp(field, columns[i], n);
    return true;
}

bool bl_file_kind_is_table(const char *path, const char *line, size_t n_bytes)
{
    const char *dot = strrchr(path, '.'), *end = line + n_bytes;
    size_t n_fields = 0;
    bool known = false;

    if (!n_bytes || *line == '{' || *line == '[') return false;
    if (dot && (!strcasecmp(dot, ".csv") || !strcasecmp(dot, ".tsv"))) return true;
    char separator = memchr(line, '\t', n_bytes) ? '\t' : memchr(line, ';', n_bytes) ? ';' : ',';
    for (const char *at = line; at <= end; n_fields++) {
        const char *next = memchr(at, separator, (size_t)(end - at));
        if (!next) next = end;
        if (!is_column(at, (size_t)(next - at), &known)) return false;
        at = next + 1;
    }
    return n_fields > 1 && known;
}

bl_status bl_file_check_kind(const char *key, const char *path, const char *mark)
{
    enum { HEAD_BYTES = 4096 };
    char head[HEAD_BYTES];
    int64_t n_bytes;
    struct stat info;
    int fd;

    if (stat(path, &info) != 0 || !S_ISREG(info.st_mode) || info.st_size == 0) return BL_OK;
    BL_TRY(bl_file_open(path, &fd, &n_bytes));
    size_t n = (size_t)bl_min_i64(n_bytes, HEAD_BYTES);
    bl_status st = bl_file_read_full(fd, path, head, n, 0);
    close(fd);
    if (st != BL_OK || memmem(head, n, mark, strlen(mark))) return st;
    return BL_FAIL(BL_EUSAGE,
                   "%s: %s exists and is another kind of file: remove it, or use a new name", key,
                   path);
}
