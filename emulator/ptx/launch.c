/* SPDX-License-Identifier: Apache-2.0 */
/* Launches as PTX. A kernel's memory is the allocations that its parameters point into. */
#include <dirent.h>
#include <dlfcn.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../counts.h"
#include "../runtime.h"
#include "launch.h"
#include "ptx.h"

enum { MODULES_MAX = 16, REGIONS_MAX = 32, PARAMETERS_BYTES_MAX = 4096 };

struct ptx_launch {
    const ptx_kernel *kernel;
    ptx_grid grid;
    int n_regions;
    ptx_region regions[REGIONS_MAX];
    unsigned char *kept[REGIONS_MAX]; /* bytes after the PTX */
    uintptr_t approximate;            /* the allocation that begins here; 0: none */
    _Alignas(16) unsigned char parameters[PARAMETERS_BYTES_MAX];
};

static ptx_module modules[MODULES_MAX];
static int n_modules;

static void read_modules(void)
{
    const char *folder = emulated_settings_get()->ptx;
    DIR *entries = folder ? opendir(folder) : NULL;
    if (folder && !entries) emulated_fatal("BALLAST_EMULATED_PTX=%s: cannot read it", folder);
    for (struct dirent *e; entries && (e = readdir(entries));) {
        char path[4096];
        size_t n = strlen(e->d_name);
        if (n < 5 || strcmp(e->d_name + n - 4, ".ptx") != 0) continue;
        if (n_modules == MODULES_MAX) emulated_fatal("%s: too many modules", folder);
        snprintf(path, sizeof path, "%s/%s", folder, e->d_name);
        modules[n_modules++] = ptx_parse(path);
    }
    if (entries) closedir(entries);
    if (folder && n_modules == 0) emulated_fatal("BALLAST_EMULATED_PTX=%s: no .ptx", folder);
}

static const ptx_kernel *find_kernel(const void *address)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    Dl_info info;
    pthread_once(&once, read_modules);
    if (n_modules == 0 || !dladdr(address, &info) || !info.dli_sname) return NULL;
    for (int m = 0; m < n_modules; m++)
        for (int k = 0; k < modules[m].n_kernels; k++)
            if (strcmp(modules[m].kernels[k].name, info.dli_sname) == 0)
                return &modules[m].kernels[k];
    return NULL;
}

static void add_region(ptx_launch *l, uintptr_t at)
{
    uintptr_t begin = emulated_memory_begin((void *)at);
    for (int r = 0; r < l->n_regions; r++)
        if (l->regions[r].begin == begin) return;
    if (begin == 0) return;
    if (l->n_regions == REGIONS_MAX) emulated_fatal("PTX: %s: too many buffers", l->kernel->name);
    l->regions[l->n_regions++] = (ptx_region){begin, emulated_memory_end((void *)at)};
}

/* log-sum-exp, attention_forward's last parameter, is maximum * scale + logf(sum): nvcc's logf and
 * the C library's are each off by one unit in the last place. */
static bool is_log(const ptx_kernel *k, size_t parameter)
{
    return strstr(k->name, "attention_forward_kernel") && parameter == 5;
}

ptx_launch *ptx_launch_create(const void *kernel, const ptx_shape *shape,
                              const void *const *parameters, const size_t *parameter_bytes,
                              size_t n_parameters)
{
    const ptx_kernel *k = find_kernel(kernel);
    if (!k) return NULL;
    ptx_launch *l = calloc(1, sizeof *l);
    if (!l) emulated_fatal("PTX: out of memory");
    l->kernel = k;
    if (!shape->is_linear || n_parameters != (size_t)k->n_parameters)
        emulated_fatal("PTX: %s: a grid along y or z, or %zu parameters", k->name, n_parameters);
    for (size_t p = 0; p < n_parameters; p++) {
        const ptx_parameter *in = &k->parameters[p];
        if ((size_t)in->bytes != parameter_bytes[p] || in->at + in->bytes > PARAMETERS_BYTES_MAX)
            emulated_fatal("PTX: %s: parameter %zu of %zu bytes", k->name, p, parameter_bytes[p]);
        memcpy(l->parameters + in->at, parameters[p], parameter_bytes[p]);
        for (int64_t at = (in->at + 7) / 8 * 8; at + 8 <= in->at + in->bytes; at += 8) {
            uintptr_t pointer;
            memcpy(&pointer, l->parameters + at, sizeof pointer);
            add_region(l, pointer);
            if (is_log(k, p)) l->approximate = emulated_memory_begin((void *)pointer);
        }
    }
    l->grid = (ptx_grid){shape->n_blocks, shape->n_threads, shape->n_clustered, shape->shared_bytes,
                         l->parameters,   l->regions,       l->n_regions};
    return l;
}

static size_t bytes_of(const ptx_region *r)
{
    return r->end - r->begin;
}

void ptx_launch_run(ptx_launch *l)
{
    for (int r = 0; r < l->n_regions; r++) {
        l->kept[r] = malloc(bytes_of(&l->regions[r]) + 1);
        if (!l->kept[r]) emulated_fatal("PTX: out of memory");
        memcpy(l->kept[r], (void *)l->regions[r].begin, bytes_of(&l->regions[r]));
    }
    ptx_run(l->kernel, &l->grid);
    for (int r = 0; r < l->n_regions; r++) {
        unsigned char *memory = (void *)l->regions[r].begin;
        for (size_t i = 0; i < bytes_of(&l->regions[r]); i++) {
            unsigned char after = memory[i];
            memory[i] = l->kept[r][i];
            l->kept[r][i] = after;
        }
    }
    emulated_count(l->kernel->name, l->grid.n_blocks); /* mangled: a C++ kernel's count is not */
}

/* logf's two units in the last place of log(n), below 8 for n < 2,980 keys, and a rounding each. */
static bool is_near(float a, float b)
{
    return fabsf(a - b) <= 0x1p-20f + 0x1p-22f * fabsf(b);
}

void ptx_launch_compare(ptx_launch *l)
{
    for (int r = 0; r < l->n_regions; r++) {
        const unsigned char *memory = (void *)l->regions[r].begin, *kept = l->kept[r];
        size_t bytes = bytes_of(&l->regions[r]), at = 0;
        while (at < bytes && memory[at] == kept[at]) at++;
        if (l->regions[r].begin == l->approximate)
            for (at = 0; at + sizeof(float) <= bytes; at += sizeof(float)) {
                float a, b;
                memcpy(&a, kept + at, sizeof a), memcpy(&b, memory + at, sizeof b);
                if (memcmp(&a, &b, sizeof a) != 0 && !is_near(a, b)) break;
            }
        if (at + (l->regions[r].begin == l->approximate ? sizeof(float) : 1) <= bytes)
            ptx_fail(l->kernel->path, 0, "%s: byte %zu of a buffer of %zu is %02x, by C++ %02x",
                     l->kernel->name, at, bytes, kept[at], memory[at]);
        free(l->kept[r]);
    }
    free(l);
}
