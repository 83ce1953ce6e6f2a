#include <vector>

#include "types.h"

double* workspace(int64_t count) {
    thread_local std::vector<double> pool;
    if ((int64_t)pool.size() < count) pool.resize(count);
    return pool.data();
}
