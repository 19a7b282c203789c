/** Checks the roles of messages, because a chat template ignores messages of roles that it does not know. */

import { ROLES } from "../../format/constants.js";
import { RequestError } from "../../protocol/errors.js";
import type { ChatMessage } from "../../protocol/openai.js";

/** Throws RequestError for a message of a role that is neither a usual one nor named by the template. */
export function checkRoles(messages: readonly ChatMessage[], template: string): void {
  const strange = messages.find(
    ({ role }) => !(ROLES as readonly string[]).includes(role) && !template.includes(role),
  );
  if (strange)
    throw new RequestError(
      `messages: this model's chat template knows no role "${strange.role}", and would ignore the message; ` +
        `there are ${ROLES.join(", ")}`,
      "messages",
    );
}
