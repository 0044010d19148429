# An optimised build by default; ccache if it is there.
if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
    set(CMAKE_BUILD_TYPE Release CACHE STRING "" FORCE)
endif()

set(CMAKE_EXPORT_COMPILE_COMMANDS ON)  # compile_commands.json, for editors and clang-tidy
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_CXX_STANDARD 17)
set(BUILD_SHARED_LIBS ON)

# Libraries find each other relative to themselves, so that an installed tree can be moved.
set(CMAKE_BUILD_WITH_INSTALL_RPATH ON)
set(PYLLAMA_ORIGIN $<IF:$<PLATFORM_ID:Darwin>,@loader_path,$ORIGIN>)
set(CMAKE_INSTALL_RPATH "${PYLLAMA_ORIGIN};${PYLLAMA_ORIGIN}/..")

find_program(PYLLAMA_CCACHE ccache)
if(PYLLAMA_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
    # Each clone and build folder has its own path, which must not be a part of the hash. And each `pip install` has another
    # cmake, in a temporary folder: `cmake -E env` would change every command, and compile everything anew.
    find_program(PYLLAMA_ENV env REQUIRED)
    set(_base ${CMAKE_BINARY_DIR})
    cmake_path(IS_PREFIX PYLLAMA_ROOT ${_base} _is_inside)
    if(_is_inside)
        set(_base ${PYLLAMA_ROOT})
    endif()
    set(_launcher ${PYLLAMA_ENV} CCACHE_NOHASHDIR=true CCACHE_BASEDIR=${_base} ${PYLLAMA_CCACHE})
    foreach(_language C CXX CUDA)
        set(CMAKE_${_language}_COMPILER_LAUNCHER ${_launcher})
    endforeach()
    message(STATUS "pyllama-mtp: using ${PYLLAMA_CCACHE}")
endif()
