/* What plan.c, choose.c and layout.c share: each asks those after it. */
#ifndef VM_PLAN_H
#define VM_PLAN_H

#include "vm.h"

/* choose.c: cuts the passes into chains and lays them out. VM_ELIMIT below the smallest plan's peak, which it says. */
vm_status vm_plan_choose(const vm_model *m, vm_plan *plan);
/* layout.c: places every piece of the chains that the plan has now, and counts. */
vm_status vm_plan_lay_out(const vm_model *m, vm_plan *plan);
/* Bytes that the plan takes besides its arena, whatever the chains. */
size_t vm_plan_beside_arena(const vm_model *m, const vm_plan *plan);
/* Bytes of one row of the tensor that a node makes. */
size_t vm_plan_row_bytes(const vm_plan *plan, int node);
static inline bool vm_plan_ends_with(const vm_plan *plan, int node) { return node + 1 == (int)plan->steps; }
/* rows: [last - first + 1], out: how high the ring of each tensor of a chain must be, from most_steps steps. */
void vm_plan_ring_rows(const vm_plan *plan, const vm_chain *chain, size_t *rows, size_t most_steps);

#endif
