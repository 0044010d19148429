// What this libllama was built from. One string literal: pyllama_mtp/llama/native.py finds it in the file, and need not
// load the library.
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
