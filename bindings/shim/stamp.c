// What this libllama was built from. One string literal, so that it can be found in the file without
// loading it; see pyllama_mtp/llama/native.py.
#include "pyllama_shim.h"

const char * pyllama_stamp(void) {
    return "{\"pyllama_stamp\": 1"
           ", \"variant\": \"" PYLLAMA_VARIANT "\""
           ", \"upstream_commit\": \"" PYLLAMA_UPSTREAM_COMMIT "\""
           ", \"series\": \"" PYLLAMA_SERIES "\""
           ", \"cpu_features\": \"" PYLLAMA_CPU_FEATURES "\""
           ", \"compiler\": \"" PYLLAMA_COMPILER "\""
           ", \"cuda\": " PYLLAMA_CUDA "}";
}
