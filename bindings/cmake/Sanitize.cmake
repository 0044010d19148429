# PYLLAMA_SANITIZE=address,undefined instruments everything that is compiled here: ggml, both libllamas, the
# shims and the extension. For tests/sanitize.py, which runs the test suite on such a build; never for a wheel.
set(PYLLAMA_SANITIZE "" CACHE STRING "sanitizers to build with, as -fsanitize= names them: address,undefined")

if(PYLLAMA_SANITIZE)
    if(NOT CMAKE_CXX_COMPILER_ID MATCHES "^(GNU|Clang)$")
        message(FATAL_ERROR "pyllama-mtp: PYLLAMA_SANITIZE needs GCC or Clang, "
            "this is ${CMAKE_CXX_COMPILER_ID}. Choose one with CMAKE_C_COMPILER and CMAKE_CXX_COMPILER.")
    endif()
    # Behind the build type's own flags: -O1 wins over its -O. Line numbers, and whole stacks without a debugger.
    add_compile_options($<$<COMPILE_LANGUAGE:C,CXX>:-fsanitize=${PYLLAMA_SANITIZE}>
        $<$<COMPILE_LANGUAGE:C,CXX>:-O1> $<$<COMPILE_LANGUAGE:C,CXX>:-g1>
        $<$<COMPILE_LANGUAGE:C,CXX>:-fno-omit-frame-pointer>)
    add_link_options(-fsanitize=${PYLLAMA_SANITIZE})
    message(STATUS "pyllama-mtp: sanitizers: ${PYLLAMA_SANITIZE}")
endif()
