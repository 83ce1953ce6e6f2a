// Threads of the OpenMP runtime that torch has loaded, found at run time: nothing is linked, no second pool is made,
// and where there is no such runtime everything runs on the calling thread.
#pragma once
#include <cstdint>

using Task = void (*)(void* data, int64_t thread, int64_t threads);

// Whether there is a runtime. As for torch's own calls, one that all libraries see comes first; then what a library of
// torch needs, or is, if it has been loaded: where wheels carry a private copy, no other library sees it.
bool find_threads(const char* library);
void run_on_threads(int64_t threads, Task task, void* data);  // task(data, 0 .. threads - 1), all at the same time
int64_t count_threads(int64_t wanted);                        // how many threads do that, if so many are asked for

// Calls body(begin, end, thread) on shares of 0 .. n - 1.
template <class Body>
inline void share_out(int64_t n, int64_t threads, const Body& body) {
    threads = threads < n ? threads : n;
    if (threads <= 1) {
        body(int64_t(0), n, int64_t(0));
        return;
    }
    struct Shared {
        const Body& body;
        int64_t n;
    } shared{body, n};
    run_on_threads(threads, [](void* data, int64_t thread, int64_t threads) {
        const Shared& s = *static_cast<Shared*>(data);
        s.body(s.n * thread / threads, s.n * (thread + 1) / threads, thread);
    }, &shared);
}
