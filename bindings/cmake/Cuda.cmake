# CUDA: on request (-DGGML_CUDA=ON), and by default if this machine has an NVIDIA GPU and nvcc.
find_program(PYLLAMA_NVCC nvcc HINTS ENV CUDA_PATH ENV CUDA_HOME PATHS /usr/local/cuda PATH_SUFFIXES bin)
if(NOT DEFINED GGML_CUDA)
    if(PYLLAMA_NVCC AND (EXISTS /dev/nvidia0 OR EXISTS /dev/dxg))
        set(GGML_CUDA ON CACHE BOOL "an NVIDIA GPU and nvcc were found")
    else()
        set(GGML_CUDA OFF CACHE BOOL "")
    endif()
endif()

if(GGML_CUDA)
    if(NOT PYLLAMA_NVCC)
        message(FATAL_ERROR "pyllama-mtp: GGML_CUDA=ON needs nvcc, and none was found on PATH, in CUDA_PATH, "
            "CUDA_HOME or /usr/local/cuda. Install the CUDA toolkit, or build without -DGGML_CUDA=ON.")
    endif()
    if(NOT CMAKE_CUDA_COMPILER)
        set(CMAKE_CUDA_COMPILER ${PYLLAMA_NVCC} CACHE FILEPATH "")
    endif()
    # If the toolkit has no cuBLAS, take the one of the nvidia-cublas package.
    find_package(CUDAToolkit REQUIRED)
    # Where the backend finds NVIDIA's packages: pyllama_mtp/ and nvidia/ lie in one folder.
    list(APPEND CMAKE_INSTALL_RPATH "$ORIGIN/../../nvidia/cu${CUDAToolkit_VERSION_MAJOR}/lib")
    if(NOT TARGET CUDA::cublas OR "${CUDA_cublas_LIBRARY}" MATCHES "^${CMAKE_BINARY_DIR}/cublas/") # now, or when configured before
        execute_process(COMMAND ${Python_EXECUTABLE} ${CMAKE_CURRENT_LIST_DIR}/find_cublas.py ${CMAKE_BINARY_DIR}/cublas
            OUTPUT_VARIABLE _cublas OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE _rc)
        if(NOT _rc EQUAL 0)
            message(FATAL_ERROR "pyllama-mtp: the CUDA toolkit here has no cuBLAS. "
                "`pip install 'nvidia-cublas==13.0.*'` (the major version of your nvcc) provides it.")
        endif()
        list(APPEND CMAKE_LIBRARY_PATH ${_cublas}/lib)
        include_directories(SYSTEM ${_cublas}/include)
        set(CMAKE_CUDA_FLAGS "${CMAKE_CUDA_FLAGS} -I${_cublas}/include")
        unset(CUDA_cublas_LIBRARY CACHE)
        unset(CUDA_cublasLt_LIBRARY CACHE)
        find_package(CUDAToolkit REQUIRED)
    endif()
    if(NOT TARGET CUDA::cuda_driver)
        set(GGML_CUDA_NO_VMM ON CACHE BOOL "no driver stub to link against")
    endif()
    # With CCCL before 3.2 (CUDA 13.0 has 3.0), ggml_top_k, which finds candidates, sorts whole rows of the vocabulary.
    # Take newer headers from the nvidia-cuda-cccl package. Upstream's switch GGML_CUDA_CUB_3DOT2 would clone CCCL from
    # GitHub; it stays off, because a build downloads nothing but the archive of the pin.
    execute_process(COMMAND ${Python_EXECUTABLE} ${CMAKE_CURRENT_LIST_DIR}/find_cublas.py
        OUTPUT_VARIABLE _cccl OUTPUT_STRIP_TRAILING_WHITESPACE)
    if(_cccl)
        set(CMAKE_CUDA_FLAGS "${CMAKE_CUDA_FLAGS} -I${_cccl}")
        message(STATUS "pyllama-mtp: CCCL of the nvidia-cuda-cccl package")
    endif()
    # For the stamp; by default, ggml builds for the GPUs of this machine.
    set(PYLLAMA_CUDA native)
    if(CMAKE_CUDA_ARCHITECTURES)
        string(REPLACE ";" " " PYLLAMA_CUDA "${CMAKE_CUDA_ARCHITECTURES}")
    endif()
endif()
message(STATUS "pyllama-mtp: CUDA ${GGML_CUDA} ${PYLLAMA_CUDA}")
