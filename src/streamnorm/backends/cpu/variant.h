// The kernels, compiled by each variant_*.cpp for its instruction set, in a namespace of its own so that the linker
// never takes one for another. No header of the standard library may be included from here on.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "parallel.h"
#include "types.h"
