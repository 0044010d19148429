# CUDA on request (-DGGML_CUDA=ON), and by itself when an NVIDIA GPU and nvcc are both here.
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
    # A toolkit without cuBLAS or without the driver stub: take cuBLAS from the nvidia-cublas package.
    find_package(CUDAToolkit REQUIRED)
    if(NOT TARGET CUDA::cublas)
        execute_process(COMMAND ${Python_EXECUTABLE} ${CMAKE_CURRENT_LIST_DIR}/find_cublas.py ${CMAKE_BINARY_DIR}/cublas
            OUTPUT_VARIABLE _cublas OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE _rc)
        if(NOT _rc EQUAL 0)
            message(FATAL_ERROR "pyllama-mtp: the CUDA toolkit here has no cuBLAS. "
                "`pip install 'nvidia-cublas==13.0.*'` (the major version of your nvcc) provides it.")
        endif()
        list(APPEND CMAKE_LIBRARY_PATH ${_cublas}/lib)
        include_directories(SYSTEM ${_cublas}/include)
        set(CMAKE_CUDA_FLAGS "${CMAKE_CUDA_FLAGS} -I${_cublas}/include")
        # Where the backend finds it: pyllama_mtp/lib/ and nvidia/ lie in one folder.
        list(APPEND CMAKE_INSTALL_RPATH "$ORIGIN/../../nvidia/cu${CUDAToolkit_VERSION_MAJOR}/lib")
        unset(CUDA_cublas_LIBRARY CACHE)
        unset(CUDA_cublasLt_LIBRARY CACHE)
        find_package(CUDAToolkit REQUIRED)
    endif()
    if(NOT TARGET CUDA::cuda_driver)
        set(GGML_CUDA_NO_VMM ON CACHE BOOL "no driver stub to link against")
    endif()
    # ggml_top_k, for candidates, sorts whole rows of the vocabulary unless CCCL is 3.2 or newer. CUDA 13.0 has 3.0.
    # Upstream's switch for that, GGML_CUDA_CUB_3DOT2, clones CCCL from GitHub at this point: off by default, as
    # the archive of the pin is all that a build downloads. Newer headers come from the nvidia-cuda-cccl package.
    execute_process(COMMAND ${Python_EXECUTABLE} ${CMAKE_CURRENT_LIST_DIR}/find_cublas.py
        OUTPUT_VARIABLE _cccl OUTPUT_STRIP_TRAILING_WHITESPACE)
    if(_cccl)
        set(CMAKE_CUDA_FLAGS "${CMAKE_CUDA_FLAGS} -I${_cccl}")
        message(STATUS "pyllama-mtp: CCCL of the nvidia-cuda-cccl package")
    endif()
    # What the stamp says; by default ggml asks for the GPUs of this machine.
    set(PYLLAMA_CUDA native)
    if(CMAKE_CUDA_ARCHITECTURES)
        string(REPLACE ";" " " PYLLAMA_CUDA "${CMAKE_CUDA_ARCHITECTURES}")
    endif()
endif()
message(STATUS "pyllama-mtp: CUDA ${GGML_CUDA} ${PYLLAMA_CUDA}")
