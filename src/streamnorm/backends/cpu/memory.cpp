#include <memory>

#include "types.h"

double* workspace(int64_t count) {
    thread_local std::unique_ptr<double[]> pool;
    thread_local int64_t size = 0;
    if (size < count) {
        size = 0;
        pool.reset();  // first, so that old and new are never held at once
        pool.reset(new double[count]);
        size = count;
    }
    return pool.get();
}
