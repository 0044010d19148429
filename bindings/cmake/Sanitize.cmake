# PYLLAMA_SANITIZE=address,undefined instruments the patched variant, for tests/sanitize.py; never for a wheel.
# It instruments ggml, the shim, the extension, and of libllama our files and those that a patch changes; with
# PYLLAMA_SANITIZE_ALL, all files of libllama. Other files are compiled as in an ordinary build, which ccache has;
# their allocations are watched all the same. The upstream variant stays as it is.
set(PYLLAMA_SANITIZE "" CACHE STRING "sanitizers to build with, as -fsanitize= names them: address,undefined")
option(PYLLAMA_SANITIZE_ALL "with PYLLAMA_SANITIZE: also the files of libllama that no patch touches" OFF)

if(PYLLAMA_SANITIZE)
    if(NOT CMAKE_CXX_COMPILER_ID MATCHES "^(GNU|Clang)$")
        message(FATAL_ERROR "pyllama-mtp: PYLLAMA_SANITIZE needs GCC or Clang, "
            "this is ${CMAKE_CXX_COMPILER_ID}. Choose one with CMAKE_C_COMPILER and CMAKE_CXX_COMPILER.")
    endif()
    # -O1 follows the build type's own -O, and wins. -g1 and frame pointers give line numbers and whole stacks.
    set(PYLLAMA_SANITIZE_OPTIONS -fsanitize=${PYLLAMA_SANITIZE} -O1 -g1 -fno-omit-frame-pointer)
    get_property(_ordinary_options DIRECTORY PROPERTY COMPILE_OPTIONS)
    foreach(_option ${PYLLAMA_SANITIZE_OPTIONS})  # for ggml, whose folder inherits them
        add_compile_options($<$<COMPILE_LANGUAGE:C,CXX>:${_option}>)
    endforeach()
    add_link_options(-fsanitize=${PYLLAMA_SANITIZE})
    message(STATUS "pyllama-mtp: sanitizers: ${PYLLAMA_SANITIZE}")
endif()

# After ggml: from here on, only the targets and sources named by the functions below are instrumented.
macro(pyllama_sanitize_the_rest_by_name)
    if(PYLLAMA_SANITIZE)
        set_property(DIRECTORY PROPERTY COMPILE_OPTIONS ${_ordinary_options})
        string(TOUPPER "${CMAKE_BUILD_TYPE}" _type)
        foreach(_language C CXX)
            set(CMAKE_${_language}_FLAGS_${_type} "${CMAKE_${_language}_FLAGS_RELEASE}")
        endforeach()
    endif()
endmacro()

function(pyllama_sanitize_target target)
    if(PYLLAMA_SANITIZE)
        target_compile_options(${target} PRIVATE ${PYLLAMA_SANITIZE_OPTIONS})
    endif()
endfunction()

function(pyllama_sanitize_all_of target)
    if(PYLLAMA_SANITIZE_ALL)
        pyllama_sanitize_target(${target})
    endif()
endfunction()

# Instrument those sources of a libllama that differ from upstream's. The other architectures go into an object library
# that is not optimised: they are half of the build, and no test runs them.
function(pyllama_sanitize_sources variable tree)
    if(NOT PYLLAMA_SANITIZE OR PYLLAMA_SANITIZE_ALL)
        return()
    endif()
    set(_others)
    foreach(_source ${${variable}})
        string(REPLACE "${tree}/" "${PYLLAMA_TREE_upstream}/" _original ${_source})
        set(_differs TRUE)
        if(NOT _source STREQUAL _original AND EXISTS ${_original})  # else it is ours
            file(MD5 ${_original} _a)
            file(MD5 ${_source} _b)
            string(COMPARE NOTEQUAL ${_a} ${_b} _differs)
        endif()
        if(_differs)
            set_source_files_properties(${_source} PROPERTIES COMPILE_OPTIONS "${PYLLAMA_SANITIZE_OPTIONS}")
            list(APPEND _instrumented ${_source})
        elseif(_source MATCHES "/src/models/")
            list(APPEND _others ${_source})
        endif()
    endforeach()
    if(_others)
        add_library(llama-untouched-models OBJECT ${_others})
        llama_target_options(llama-untouched-models ${tree})
        target_compile_options(llama-untouched-models PRIVATE -O0)
        llama_unity(llama-untouched-models)
        list(REMOVE_ITEM ${variable} ${_others})
        set(${variable} ${${variable}} $<TARGET_OBJECTS:llama-untouched-models> PARENT_SCOPE)
    endif()
    list(LENGTH _instrumented _n)
    message(STATUS "pyllama-mtp: ${_n} sources of libllama are instrumented")
endfunction()
