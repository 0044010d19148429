# ggml is built once, from PYLLAMA_TREE_ggml, for both variants. So the patches may change in it only:
# - the CPU backend, behind switches that the upstream variant turns off when it is loaded (pyllama_set_cpu_changes)
# - the RPC backend: lost workers, several clients of a worker
# - what follows a failed allocation; how inputs travel to a device, in the upstream variant too
# - schedulers that borrow each other's buffers, and an operator behind all others, which nobody uses in that variant
# - the CUDA backend, for operators that nobody uses in the upstream variant
# - the Vulkan backend, so that it compiles
set(_may_differ ggml/src/ggml-alloc.c ggml/src/ggml-backend.cpp ggml/include/ggml-alloc.h ggml/include/ggml-backend.h
    ggml/src/ggml.c ggml/include/ggml.h)
set(GGML_BACKEND_DL ON CACHE BOOL "" FORCE)
set(GGML_BUILD_TESTS OFF CACHE BOOL "" FORCE)
set(GGML_BUILD_EXAMPLES OFF CACHE BOOL "" FORCE)
# Upstream's top-level CMakeLists.txt, which we do not run, turns these on.
set(GGML_LLAMAFILE_DEFAULT ON)
set(GGML_CUDA_GRAPHS_DEFAULT ON)
# Devices of other processes and machines. No RDMA: every user of a wheel would need its library.
set(GGML_RPC ON CACHE BOOL "the RPC backend: workers (pyllama-mtp rpc-worker)")
set(GGML_RPC_RDMA OFF CACHE BOOL "RDMA transport of the RPC backend")

file(GLOB_RECURSE _theirs RELATIVE ${PYLLAMA_TREE_upstream} ${PYLLAMA_TREE_upstream}/ggml/*)
foreach(_file ${_theirs})
    execute_process(COMMAND ${CMAKE_COMMAND} -E compare_files
        ${PYLLAMA_TREE_upstream}/${_file} ${PYLLAMA_TREE_patched}/${_file} RESULT_VARIABLE _differs)
    if(_differs AND NOT _file MATCHES "^ggml/(src/ggml-(cpu|cuda|rpc|vulkan)/|include/ggml-rpc)" AND NOT _file IN_LIST _may_differ)
        message(FATAL_ERROR "pyllama-mtp: ${_file} differs between the variants, but they share ggml: only its "
            "CPU backend may differ, behind a switch, its CUDA, RPC and Vulkan backends, its schedulers, and its operators. "
            "Mark the patch `both` in patches/series.")
    endif()
endforeach()

set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/backends)
# ggml asks git for its commit, and would get that of this project, which changes often.
set(ENV{GIT_CEILING_DIRECTORIES} ${CMAKE_BINARY_DIR})
# The shim turns a failed assertion into a C++ exception, which passes through C code.
add_compile_options($<$<COMPILE_LANGUAGE:C>:-fexceptions>)
# The Vulkan backend has a project inside, whose cache names the ninja of an earlier run of pip. That ninja is gone.
file(REMOVE ${CMAKE_BINARY_DIR}/ggml/src/ggml-vulkan/vulkan-shaders-gen-prefix/src/vulkan-shaders-gen-build/CMakeCache.txt)
add_subdirectory(${PYLLAMA_TREE_ggml}/ggml ${CMAKE_BINARY_DIR}/ggml EXCLUDE_FROM_ALL)

include(OurSources)

# Backends are loaded by file name, so they carry no version. A wheel holds no links, so ggml and ggml-base are installed
# under their SONAME, by which other libraries ask for them.
set(PYLLAMA_BACKENDS ${GGML_AVAILABLE_BACKENDS})
pyllama_choose_generations()
foreach(_target ggml ggml-base)
    set_property(TARGET ${_target} PROPERTY VERSION)
    set_property(TARGET ${_target} PROPERTY PUBLIC_HEADER)
endforeach()
foreach(_target ${PYLLAMA_BACKENDS})
    set_property(TARGET ${_target} PROPERTY VERSION)
    set_property(TARGET ${_target} PROPERTY SOVERSION)
endforeach()
