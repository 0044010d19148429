# An optimised build by default; ccache if it is there.
if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
    set(CMAKE_BUILD_TYPE Release CACHE STRING "" FORCE)
endif()

set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_CXX_STANDARD 17)
set(BUILD_SHARED_LIBS ON)

# Libraries find each other relative to themselves, so that an installed tree can be moved.
set(CMAKE_BUILD_WITH_INSTALL_RPATH ON)
set(PYLLAMA_ORIGIN $<IF:$<PLATFORM_ID:Darwin>,@loader_path,$ORIGIN>)
set(CMAKE_INSTALL_RPATH "${PYLLAMA_ORIGIN};${PYLLAMA_ORIGIN}/..")

find_program(PYLLAMA_CCACHE ccache)
if(PYLLAMA_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
    # Each `pip install` may have another build folder, so its path must not be a part of the hash. And each has another
    # cmake, in a temporary folder: `cmake -E env` would change every command, and compile everything anew.
    find_program(PYLLAMA_ENV env REQUIRED)
    set(_launcher ${PYLLAMA_ENV} CCACHE_NOHASHDIR=true CCACHE_BASEDIR=${CMAKE_BINARY_DIR} ${PYLLAMA_CCACHE})
    foreach(_language C CXX CUDA)
        set(CMAKE_${_language}_COMPILER_LAUNCHER ${_launcher})
    endforeach()
    message(STATUS "pyllama-mtp: using ${PYLLAMA_CCACHE}")
endif()
