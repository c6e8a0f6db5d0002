/* SPDX-License-Identifier: Apache-2.0 */
/* How often a program has the GPU do what: kernels by name, products, copies with their bytes.
 * Written at the program's end, a line each in order, to the file that BALLAST_EMULATED_COUNTS
 * names, %p in it being the process's number; nothing is counted without it. */
#include "counts.h"

#include <cxxabi.h>
#include <dlfcn.h>
#include <unistd.h>
#include <stdio.h>
#include <stdlib.h>

#include <map>
#include <mutex>
#include <string>

struct count {
    unsigned long long n, bytes;
};

static std::mutex lock;
/* until the very end */
static std::map<std::string, count> &counts = *new std::map<std::string, count>;
static const char *path;

static void write_counts()
{
    std::lock_guard<std::mutex> hold(lock);
    FILE *file = fopen(path, "w");
    if (!file) return perror(path);
    for (auto &c : counts)
        fprintf(file, "%s %llu %llu\n", c.first.c_str(), c.second.n, c.second.bytes);
    fclose(file);
}

static bool is_counting()
{
    static bool is = [] {
        const char *name = getenv("BALLAST_EMULATED_COUNTS");
        if (!name) return false;
        static std::string whole = name;
        size_t at = whole.find("%p");
        if (at != std::string::npos) whole.replace(at, 2, std::to_string(getpid()));
        path = whole.c_str();
        atexit(write_counts);
        return true;
    }();
    return is;
}

void emulated_count(const char *what, size_t bytes)
{
    if (!is_counting()) return;
    std::lock_guard<std::mutex> hold(lock);
    count &c = counts[what];
    c.n++;
    c.bytes += bytes;
}

/* "void add_kernel<unsigned short>(long, ...)" is kernel:add_kernel. */
void emulated_count_kernel(const void *kernel)
{
    if (!is_counting()) return;
    Dl_info info;
    int status;
    char *text = dladdr(kernel, &info) && info.dli_sname
                     ? abi::__cxa_demangle(info.dli_sname, nullptr, nullptr, &status)
                     : nullptr;
    std::string name = text ? text : "?";
    free(text);
    name = name.substr(0, name.find_first_of("<("));
    name = "kernel:" + name.substr(name.rfind(' ') + 1);
    emulated_count(name.c_str(), 0);
}
