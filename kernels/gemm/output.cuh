// How C is written; the numbers are those of the define GEMM_OUT.
#pragma once

namespace matmul {

enum class Output { bf16, f32, f32_add };  // f32_add: added to what is there

}  // namespace matmul
