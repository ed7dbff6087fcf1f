/* Shared by plan.c, choose.c and layout.c. Each calls only those after it. */
#ifndef VM_PLAN_H
#define VM_PLAN_H

#include "../vm.h"

/* choose.c: cuts the passes into chains and lays them out. VM_ELIMIT if the limit is below the smallest plan's peak;
 * the message names that peak. */
vm_status vm_plan_choose(const vm_model *m, vm_plan *plan);
/* layout.c: places every piece of the plan's current chains, and counts bytes. ring: room for a number per node. */
vm_status vm_plan_lay_out(const vm_model *m, vm_plan *plan, size_t *ring);
/* Returns: bytes of the plan outside its arena, for any chains. */
size_t vm_plan_bytes_outside_arena(const vm_model *m, const vm_plan *plan);
/* Returns: bytes of one row of a node's tensor. */
size_t vm_plan_row_bytes(const vm_plan *plan, int node);
/* Returns: bytes from row to row of a node's tensor, in its piece. */
size_t vm_plan_pitch_bytes(const vm_plan *plan, int node);
/* Returns: byte of a piece from which on a chain with these stages still reads it. */
size_t vm_plan_read_from(const vm_plan *plan, const vm_chain *chain, const vm_stage *stage, size_t stages, int piece);
static inline bool vm_plan_ends_with(const vm_plan *plan, int node) { return node + 1 == (int)plan->steps; }
/* rows: [last - first + 1], out: the height of each tensor's ring in a chain that runs in at most most_steps steps. */
void vm_plan_ring_rows(const vm_plan *plan, const vm_chain *chain, size_t *rows, size_t most_steps);

#endif
