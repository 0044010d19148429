# The CPU backend is built for the features of this machine, as /proc/cpuinfo lists them. On x86-64, each feature has an
# option of ggml's, which also compiles a check into the backend: a machine without the feature refuses the library. On
# aarch64 the features are parts of -march. With -march=native the library would die of SIGILL elsewhere, and on x86-64
# GGML_NATIVE excludes GGML_BACKEND_DL.
#
# PYLLAMA_CPU_ALL=ON, for wheels that travel, builds a backend for each CPU generation. A build for another kind of machine
# (a toolchain file) does so by default, because it cannot ask that machine; PYLLAMA_CPUINFO may hold a copy of its
# /proc/cpuinfo.
set(PYLLAMA_CPUINFO "" CACHE FILEPATH "/proc/cpuinfo of the machine to build for; default: this one's")
set(_all OFF)
if(CMAKE_CROSSCOMPILING AND NOT PYLLAMA_CPUINFO AND NOT GGML_CPU_ARM_ARCH)
    set(_all ON)
endif()
option(PYLLAMA_CPU_ALL "build the CPU backend for every generation of the CPU's kind, chosen at load time" ${_all})
set(PYLLAMA_CPU_GENERATIONS "" CACHE STRING "with PYLLAMA_CPU_ALL: only these, e.g. haswell;zen4; default: every one")

set(GGML_NATIVE OFF CACHE BOOL "" FORCE)
set(GGML_CPU_ALL_VARIANTS ${PYLLAMA_CPU_ALL} CACHE BOOL "" FORCE)
set(PYLLAMA_CPU_FEATURES "")

set(_cpuinfo "${PYLLAMA_CPUINFO}")
if(NOT _cpuinfo AND NOT CMAKE_CROSSCOMPILING)
    set(_cpuinfo /proc/cpuinfo)
endif()
set(_flags "")
if(PYLLAMA_CPUINFO AND NOT EXISTS "${PYLLAMA_CPUINFO}")
    message(FATAL_ERROR "pyllama-mtp: PYLLAMA_CPUINFO names ${PYLLAMA_CPUINFO}, which is not there.")
elseif(EXISTS "${_cpuinfo}")
    file(STRINGS "${_cpuinfo}" _flags REGEX "^(flags|Features)[ \t]*:" LIMIT_COUNT 1)
endif()

# ggml option | flag in /proc/cpuinfo
set(_x86_features
    SSE42:sse4_2 AVX:avx AVX2:avx2 BMI2:bmi2 FMA:fma F16C:f16c AVX_VNNI:avx_vnni
    AVX512:avx512bw AVX512_VBMI:avx512vbmi AVX512_VNNI:avx512_vnni AVX512_BF16:avx512_bf16
    AMX_TILE:amx_tile AMX_INT8:amx_int8 AMX_BF16:amx_bf16)
# extension in -march | flag in /proc/cpuinfo | name under hw.optional.arm in macOS's sysctl
set(_arm_features
    dotprod:asimddp:FEAT_DotProd fp16:asimdhp:FEAT_FP16 i8mm:i8mm:FEAT_I8MM bf16:bf16:FEAT_BF16
    sve:sve:FEAT_SVE sve2:sve2:FEAT_SVE2)

# Sets the options of _x86_features that the user has not set, by _flags.
function(pyllama_x86_features)
    foreach(_pair ${_x86_features})
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
    set(PYLLAMA_CPU_FEATURES "${PYLLAMA_CPU_FEATURES}" PARENT_SCOPE)
endfunction()

# Sets GGML_CPU_ARM_ARCH, if the user has not set it, to what the machine has and the compiler knows.
function(pyllama_arm_features)
    include(CheckCXXCompilerFlag)
    set(_arch armv8-a)
    foreach(_triple ${_arm_features})
        string(REPLACE ":" ";" _triple ${_triple})
        list(GET _triple 0 _extension)
        list(GET _triple 1 _flag)
        list(GET _triple 2 _key)
        set(_has "")
        if(CMAKE_HOST_APPLE AND NOT CMAKE_CROSSCOMPILING)
            execute_process(COMMAND sysctl -n hw.optional.arm.${_key} OUTPUT_VARIABLE _has ERROR_QUIET
                OUTPUT_STRIP_TRAILING_WHITESPACE)
        elseif(" ${_flags} " MATCHES " ${_flag} ")
            set(_has 1)
        endif()
        if(GGML_CPU_ARM_ARCH MATCHES "\\+${_extension}(\\+|$)")
            list(APPEND PYLLAMA_CPU_FEATURES ${_flag})
        elseif(_has AND NOT GGML_CPU_ARM_ARCH)
            string(REPLACE "armv8-a" "armv8.2-a" _wanted ${_arch}+${_extension})
            check_cxx_compiler_flag(-march=${_wanted} PYLLAMA_COMPILES_${_wanted})
            if(PYLLAMA_COMPILES_${_wanted})
                set(_arch ${_wanted})
                list(APPEND PYLLAMA_CPU_FEATURES ${_flag})
            else()
                message(STATUS "pyllama-mtp: this machine has ${_flag}, but the compiler does not know it")
            endif()
        endif()
    endforeach()
    if(NOT GGML_CPU_ARM_ARCH)
        set(GGML_CPU_ARM_ARCH ${_arch} PARENT_SCOPE)
    endif()
    set(PYLLAMA_CPU_FEATURES "${PYLLAMA_CPU_FEATURES}" PARENT_SCOPE)
endfunction()

if(PYLLAMA_CPU_ALL)
    set(PYLLAMA_CPU_FEATURES "")  # each backend has its own
elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
    pyllama_x86_features()
elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "^(aarch64|arm64)$")
    pyllama_arm_features()
endif()
if(NOT PYLLAMA_CPU_ALL AND NOT CMAKE_CROSSCOMPILING AND CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64|aarch64)$")
    add_compile_options($<$<COMPILE_LANGUAGE:C,CXX>:-mtune=native>)
endif()
string(REPLACE ";" " " PYLLAMA_CPU_FEATURES "${PYLLAMA_CPU_FEATURES}")
message(STATUS "pyllama-mtp: CPU features: ${PYLLAMA_CPU_FEATURES}")

# After ggml: of the backends for each generation, leaves those that the compiler knows (GCC 12 knows no armv9.2-a), and of
# them those that PYLLAMA_CPU_GENERATIONS names. ggml depends on all of them, so the others become empty.
function(pyllama_choose_generations)
    include(CheckCXXCompilerFlag)
    set(_empty ${CMAKE_BINARY_DIR}/generated/empty.c)
    file(CONFIGURE OUTPUT ${_empty} CONTENT "typedef int nothing;\n")
    foreach(_target ${PYLLAMA_BACKENDS})
        if(NOT _target MATCHES "^ggml-cpu-(.+)$")
            continue()
        endif()
        set(_generation ${CMAKE_MATCH_1})
        get_target_property(_options ${_target} COMPILE_OPTIONS)
        list(FILTER _options INCLUDE REGEX "^-m")
        list(JOIN _options " " _words)
        check_cxx_compiler_flag("${_words}" PYLLAMA_COMPILES_${_generation})
        if(PYLLAMA_COMPILES_${_generation}
                AND (NOT PYLLAMA_CPU_GENERATIONS OR _generation IN_LIST PYLLAMA_CPU_GENERATIONS))
            list(APPEND _kept ${_generation})
        else()
            list(REMOVE_ITEM PYLLAMA_BACKENDS ${_target})
            set_target_properties(${_target} PROPERTIES SOURCES ${_empty} COMPILE_OPTIONS "" LINK_LIBRARIES ""
                LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/unused)
        endif()
    endforeach()
    if(PYLLAMA_CPU_ALL)
        if(NOT _kept)
            message(FATAL_ERROR "pyllama-mtp: PYLLAMA_CPU_GENERATIONS=${PYLLAMA_CPU_GENERATIONS} names none of ggml's "
                "generations (ggml/src/CMakeLists.txt) that this compiler knows.")
        endif()
        list(JOIN _kept " " _kept)
        message(STATUS "pyllama-mtp: CPU generations: ${_kept}")
        set(PYLLAMA_BACKENDS ${PYLLAMA_BACKENDS} PARENT_SCOPE)
    endif()
endfunction()
