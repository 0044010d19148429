# The CPU backend is built for the features of this machine. Each feature has an option of ggml's, which also compiles a
# check into the backend: a machine without the feature refuses the library. With -march=native it would die of SIGILL,
# and GGML_NATIVE excludes GGML_BACKEND_DL. PYLLAMA_CPU_ALL=ON, for wheels that travel, builds a backend for each CPU
# generation.
option(PYLLAMA_CPU_ALL "build the CPU backend for every x86-64 generation, chosen at load time" OFF)

set(GGML_NATIVE OFF CACHE BOOL "" FORCE)
set(GGML_CPU_ALL_VARIANTS ${PYLLAMA_CPU_ALL} CACHE BOOL "" FORCE)
set(PYLLAMA_CPU_FEATURES "")

# ggml option | flag in /proc/cpuinfo
set(_features
    SSE42:sse4_2 AVX:avx AVX2:avx2 BMI2:bmi2 FMA:fma F16C:f16c AVX_VNNI:avx_vnni
    AVX512:avx512bw AVX512_VBMI:avx512vbmi AVX512_VNNI:avx512_vnni AVX512_BF16:avx512_bf16
    AMX_TILE:amx_tile AMX_INT8:amx_int8 AMX_BF16:amx_bf16)

if(NOT PYLLAMA_CPU_ALL AND CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
    set(_flags "")
    if(EXISTS /proc/cpuinfo)
        file(STRINGS /proc/cpuinfo _flags REGEX "^flags" LIMIT_COUNT 1)
    endif()
    foreach(_pair ${_features})
        string(REPLACE ":" ";" _pair ${_pair})
        list(GET _pair 0 _option)
        list(GET _pair 1 _flag)
        if(NOT DEFINED GGML_${_option})
            if(" ${_flags} " MATCHES " ${_flag} ")
                set(GGML_${_option} ON CACHE BOOL "this machine has ${_flag}")
            else()
                set(GGML_${_option} OFF CACHE BOOL "this machine lacks ${_flag}")
            endif()
        endif()
        if(GGML_${_option})
            list(APPEND PYLLAMA_CPU_FEATURES ${_flag})
        endif()
    endforeach()
    add_compile_options($<$<COMPILE_LANGUAGE:C,CXX>:-mtune=native>)
endif()
string(REPLACE ";" " " PYLLAMA_CPU_FEATURES "${PYLLAMA_CPU_FEATURES}")
message(STATUS "pyllama-mtp: CPU features: ${PYLLAMA_CPU_FEATURES}")
