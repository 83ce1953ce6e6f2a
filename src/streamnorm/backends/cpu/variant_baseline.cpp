#include "variant.h"

namespace baseline {
#include "kernels.h"
}

const Kernels baseline_kernels = baseline::kernels;
