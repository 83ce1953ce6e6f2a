// What parallel.cpp finds before and after a library is loaded that shares nothing with others, as Python loads torch.
#include <dlfcn.h>

#include <cstdio>

#include "parallel.h"

int main(int, char** arguments) {  // the library, and the name that it is looked for by
    const char *library = arguments[1], *name = arguments[2];
    const bool found_before = find_threads(name);
    const long before = count_threads(4);
    if (!dlopen(library, RTLD_NOW | RTLD_LOCAL)) {
        std::fprintf(stderr, "%s\n", dlerror());
        return 1;
    }
    const bool global = dlsym(RTLD_DEFAULT, "GOMP_parallel");
    const bool found = find_threads(name);
    std::printf("before %d %ld, global %d, after %d %ld\n", found_before, before, global, found, (long)count_threads(4));
}
