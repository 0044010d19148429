#pragma once

// Called for each step by which a grammar's stacks advance. Throws if this thread has used up the time of
// llama_mtp_limit_grammar().
void llama_grammar_step();
