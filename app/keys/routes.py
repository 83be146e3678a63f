"""`/v1/api_keys`: for the admin scope."""

from fastapi import APIRouter, Depends
from sqlalchemy import select

from app.db import transaction
from app.dependencies import CallerDep, admins_only
from app.errors import Forbidden
from app.keys import service
from app.keys.models import ApiKey
from app.keys.schemas import KeyDeleted, KeyObject, KeyRequest, NewKeyObject, key_object, new_key_object
from app.paging import ListObject, PagingDep, page

router = APIRouter(prefix="/v1/api_keys", tags=["api keys"], dependencies=[Depends(admins_only)])


@router.post("")
def create_key(request: KeyRequest, caller: CallerDep) -> NewKeyObject:
    """Make a key. Its text is in this answer and nowhere else. The first one is made by `qerl keys create`."""
    if caller is service.OPEN:
        raise Forbidden(
            "The first key is made on the machine itself: `qerl keys create`, or set QERL_ADMIN_KEY.",
            code="insufficient_permissions",
        )
    with transaction() as session:
        made = service.create(
            session, request.name, owner=request.owner, scope=request.widest(), expires_at=request.expires_at
        )
        return new_key_object(*made)


@router.get("")
def list_keys(paging: PagingDep) -> ListObject[KeyObject]:
    """A page of keys, newest first, revoked and expired ones too."""
    with transaction(read_only=True) as session:
        return page(session, select(ApiKey), ApiKey.id, paging, shown=key_object)


@router.get("/{key_id}")
def retrieve_key(key_id: str) -> KeyObject:
    """A key."""
    with transaction(read_only=True) as session:
        return key_object(service.get(session, key_id))


@router.delete("/{key_id}")
def revoke_key(key_id: str) -> KeyDeleted:
    """Let a key in no more. Its files and jobs stay, for its owner's other keys."""
    with transaction() as session:
        service.revoke(session, key_id)
    return KeyDeleted(id=key_id)
